"""Root's helper as systemd runs it: a process a connection, started by systemd's own systemd-socket-activate."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.needs import need, need_root

START_WITHIN_S = 30


@contextlib.contextmanager
def helper(folder: Path, config: Path, user: str = "nobody") -> Iterator[Path]:
    """Its socket, which everybody may connect to here: the packaged one's mode is systemd's work. `user`: the service's."""
    need_root("a helper that is root")
    tool = need("systemd-socket-activate", "systemd")
    path = folder / "helper.sock"
    argv = [tool, "--accept", "--seqpacket", f"--listen={path}", sys.executable, "-P", "-m", "synvirt.privileged.helper"]
    with (folder / "helper.log").open("wb") as log:
        child = subprocess.Popen(
            [*argv, "--config", str(config), "--user", user], stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_WITHIN_S
        while not path.exists():
            assert child.poll() is None, (folder / "helper.log").read_text()
            assert time.monotonic() < deadline, "its socket does not come"
            time.sleep(0.02)
        path.chmod(0o666)
        yield path
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
