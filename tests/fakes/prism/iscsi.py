"""A real iSCSI target: tgt (Debian's tgt). A volume group is a target, a disk of it a LUN, a client that is let in an ACL."""

import itertools
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from synvirt.programs import end_group
from tests.fakes.prism.state import Group, State
from tests.needs import need, need_root
from tests.running.ports import free_port

PREFIX = "iqn.2010-06.com.nutanix:"
START_TIMEOUT_S = 30


@contextmanager
def iscsi_target(folder: Path, state: State) -> Iterator[str]:
    """The portal, as the cluster's data services address."""
    daemon, admin = need("tgtd", "tgt"), need("tgtadm", "tgt")
    need_root("tgtd, which keeps its socket in /var/run/tgtd")
    folder.mkdir()
    # Its control port is the name of a socket of the machine's.
    control, port = free_port(), free_port()
    numbers: dict[str, int] = {}
    fresh = itertools.count(1)

    def run(*arguments: str) -> None:
        subprocess.run([admin, "-C", str(control), "--lld", "iscsi", *arguments], check=True, timeout=30, capture_output=True)

    def on_group(what: str, group: Group) -> None:
        if what == "made":
            numbers[group.id] = next(fresh)
            run("--op", "new", "--mode", "target", "--tid", str(numbers[group.id]), "-T", PREFIX + group.target)
        elif what == "disk":
            one = group.disks[-1]
            tid = str(numbers[group.id])
            run("--op", "new", "--mode", "logicalunit", "--tid", tid, "--lun", str(one.index), "-b", str(one.path))
        elif what == "clients":
            tid = str(numbers[group.id])
            with suppress(subprocess.CalledProcessError):  # there is none yet
                run("--op", "unbind", "--mode", "target", "--tid", tid, "-I", "ALL")
            if group.clients:
                run("--op", "bind", "--mode", "target", "--tid", tid, "-I", "ALL")
        else:
            run("--op", "delete", "--mode", "target", "--tid", str(numbers.pop(group.id)), "--force")

    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            [daemon, "-f", "-C", str(control), "--iscsi", f"portal=127.0.0.1:{port}"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as child,
    ):
        try:
            until = time.monotonic() + START_TIMEOUT_S
            while True:
                try:
                    run("--op", "show", "--mode", "target")
                    break
                except subprocess.CalledProcessError:
                    assert child.poll() is None, (folder / "log").read_text()
                    assert time.monotonic() < until, (folder / "log").read_text()
                    time.sleep(0.05)
            state.on_group = on_group
            yield f"127.0.0.1:{port}"
        finally:
            state.on_group = lambda _what, _group: None
            end_group(child)
            Path(f"/var/run/tgtd/socket.{control}").unlink(missing_ok=True)
            Path(f"/var/run/tgtd/socket.{control}.lock").unlink(missing_ok=True)
