"""Real NBD servers for tests: started in a process group of their own, ended with it."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from synvirt.programs import end_group
from tests.needs import need

START_TIMEOUT_S = 60


@contextmanager
def serving(argv: Sequence[str], socket: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs qemu-nbd or nbdkit at `socket`, until the block ends."""
    log, ready = socket.with_suffix(".log"), socket.with_suffix(".pid")
    # The socket is there before anybody listens; the pid file, when all is ready. Both programs know this option.
    argv = [argv[0], f"--pid{'-' if 'qemu' in argv[0] else ''}file={ready}", *argv[1:]]
    with log.open("wb") as output, subprocess.Popen(argv, start_new_session=True, stdout=output, stderr=output) as child:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                assert child.poll() is None, log.read_text(errors="replace")
                assert time.monotonic() < deadline, f"{argv[0]} is not ready: {log.read_text(errors='replace')}"
                time.sleep(0.01)
            yield child
        finally:
            end_group(child)
            child.wait()
            socket.unlink(missing_ok=True)
            ready.unlink(missing_ok=True)


@contextmanager
def qemu_nbd(image: Path, image_format: str, *options: str) -> Iterator[str]:
    """Serves an image read-only; its NBD URI."""
    program = need("qemu-nbd", "qemu-utils")
    socket = image.with_name(f"{image.name}.nbd")
    with serving([program, "-r", "-t", "-e", "8", "-f", image_format, "-k", str(socket), *options, str(image)], socket):
        yield f"nbd+unix:///?socket={socket}"


@contextmanager
def nbdkit(folder: Path, *arguments: str) -> Iterator[str]:
    """Runs nbdkit with these options and this plugin; its NBD URI."""
    program = need("nbdkit", "nbdkit")
    socket = folder / "nbdkit.sock"
    with serving([program, "-f", "-r", "-U", str(socket), *arguments], socket):
        yield f"nbd+unix:///?socket={socket}"
