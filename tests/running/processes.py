"""What runs on this machine, and what it has open, read from /proc."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.running import forked

# <linux/seccomp.h>: SECCOMP_MODE_FILTER.
FILTERED = "2"


def children(parent: int | None = None) -> dict[int, str]:
    """The living descendants of a process (by default this one), with their command lines. Zombies do not live. What this one
    had forked for it (`forked.py`) are its descendants too."""
    assert Path("/proc/thread-self/children").exists(), "a kernel without CONFIG_PROC_CHILDREN"
    found: dict[int, str] = {}
    of, ordered = [parent or os.getpid()], _small_by_order()
    if of == [os.getpid()]:
        forks = [pid for pid in forked.begun() if _is_alive(pid)]
        found = {pid: command_line(pid) for pid in forks}
        of += forks
    while of:
        by = of.pop()
        for pid in (*_begun_by(by), *ordered.get(by, ())):
            if pid not in found and _is_alive(pid):
                found[pid] = command_line(pid)
                of.append(pid)
    return found


def _small_by_order() -> dict[int, list[int]]:
    """The small programs that were forked (`forked_small.py`), by the processes that ordered them."""
    found: dict[int, list[int]] = {}
    for forking in forked.forking():
        for small in _begun_by(forking):
            if "tests.running.forking_small" in command_line(small):
                for pid in _begun_by(small):
                    if by := re.search(r" ordered-by=(\d+)$", command_line(pid)):
                        found.setdefault(int(by[1]), []).append(pid)
    return found


def _begun_by(parent: int) -> list[int]:
    """By each of its threads. To look through all processes of the machine costs two hundred times as much."""
    begun: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                begun += map(int, thread.read_text().split())
    return begun


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_ssh(command: str) -> bool:
    return command.partition(" ")[0].rpartition("/")[2] == "ssh"


def is_guest(command: str) -> bool:
    """Whether a command line is that of a QEMU with a guest. One without a machine is asked by libvirt what it can do, and ends
    by itself."""
    return re.match(r"\S*qemu-system", command) is not None and " -machine none," not in command


def guests_of(*marks: object) -> list[int]:
    """The QEMUs that run a guest and have one of these in their arguments: a folder, a UUID."""
    found = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in found if is_guest(command := command_line(pid)) and any(str(mark) in command for mark in marks)]


def stopped(pid: int) -> None:
    """Wait until each thread of a process that was sent SIGSTOP has stopped; until one of them took the signal, all work on."""
    until = time.monotonic() + 60
    while _states(pid) != {"T"}:
        assert time.monotonic() < until, "it does not stop"
        time.sleep(0.01)


def _states(pid: int) -> set[str]:
    states = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended before the signal reached it
            states.add((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states


def workers(parent: int | None = None) -> list[int]:
    """The copy workers among the descendants."""
    return [pid for pid, command in children(parent).items() if "synvirt.worker" in command]


@contextlib.contextmanager
def ready(module: str, *arguments: str, log: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m MODULE ARGUMENTS…`, once it has printed "ready"; killed at the end, if it still lives. `log` gets what it
    complains of; `environment` comes on top of this process's own."""
    argv = [sys.executable, "-m", module, *arguments]
    with log.open("a") as errors:
        process = forked.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | environment)
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != "ready\n":
            pass
        assert line, log.read_text()[-3000:]
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def caged(pid: int) -> Iterator[set[str]]:
    """Each seccomp mode that a worker of the service was seen in, during the block."""
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        # A look at all processes takes 5 ms of a core: once one worker was caught, and a service is tested for minutes, seldom.
        while not over.wait(1 if FILTERED in seen else 0.05):
            for worker in workers(pid):
                with contextlib.suppress(OSError):
                    found = re.search(r"^Seccomp:\s*(\d)", Path(f"/proc/{worker}/status").read_text(), re.MULTILINE)
                    seen.update([found[1]] if found else [])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def open_files(folder: Path) -> list[str]:
    """Those below it that this process has open. What else is open may be closed at any moment, by the collector."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(descriptor.readlink())
    return [str(path) for path in found if path.is_relative_to(folder.resolve())]


def until(happened: Callable[[], object], timeout_s: float = 60) -> None:
    """Wait for what happens elsewhere: in another process, or in a thread."""
    began, pause_s = time.monotonic(), 0.02
    while not happened():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, "it did not happen in time"
        time.sleep(pause_s)
        # Many tests ask a service. Each that asks ten times a second takes a tenth of a core, so later tries are further apart.
        pause_s = min(pause_s * 1.1, max(0.1, waited_s / 20), 0.3)
