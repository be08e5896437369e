"""Runs outside programs; no other module does. Argument lists, never a shell; a time limit; stderr in the error.

Each runs in a process group of its own, so that ending it ends its children too. Blocking code.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

from synvirt.errors import Cancelled, Internal, SynvirtError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

# Enough to show what went wrong, too little to fill a log.
STDERR_KEPT_CHARS = 2000
STDERR_READ_BYTES = 256 << 10
LINE_KEPT_CHARS = 65536
OUTPUT_BUFFER_BYTES = 1 << 20
# The longest that is kept, a list of all snapshots of a large pool, has some MiB. A host that is asked by ssh could send
# without end.
OUTPUT_BYTES_MAX = 64 << 20
OUTPUT_READ_BYTES = 64 << 10
# How often it is asked whether a program should stop.
STOP_POLL_S = 0.2
# A grandchild may hold the output open after the program has ended.
LINES_LATE_S = 5
# A killed process closes its files at once, unless its disk does not answer.
GONE_TIMEOUT_S = 10
GUARD = Path(__file__).with_name("guard.py")
# Debian keeps administrators' tools (zfs, blkdiscard, libvirtd) here; a service's PATH often lacks them.
ADMIN_PATHS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
# What a program says of ENOSPC (strerror(3)), as it has no other way to say it.
NO_SPACE = "No space left"
# What the kernel ends a process by where memory is short, and an administrator.
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
ENDED_HINT = "something on this host ended it, for example as memory was short: journalctl -k"
# Set in a process whose cage starts no programs: it records that one was needed, so that the order can be given again.
forbidden = False
refused: list[str] = []


@dataclass(frozen=True, slots=True)
class Output:
    """What a program printed."""

    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class As:
    """Another user than root, for a program that root starts."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class ProgramFailed(Internal):
    """An outside program failed. `returncode` None: we ended it. `ended`: why. `cut_off`: how its end came, where the program
    did not end by itself. `from_outside`: by something else of this host, whatever the program did."""

    def __init__(self, program: str, returncode: int | None, stderr: str, *, ended: str | None = None) -> None:
        self.program, self.returncode, self.stderr = program, returncode, stderr.strip()[-STDERR_KEPT_CHARS:]
        signalled = _signal_of(returncode)
        ended = ended or ("took too long" if returncode is None else None)
        self.cut_off = ended or (f"was ended by {signalled}" if signalled else None)
        self.from_outside = is_from_outside(returncode)
        how = self.cut_off or f"ended with {returncode}"
        super().__init__(f"{program} {how}: {self.stderr or 'it printed no message'}")


def is_from_outside(returncode: int | None) -> bool:
    """Whether it was ended by a signal that no program gets for a mistake of its own, or for the data that it reads."""
    return _signal_of(returncode) in _FROM_OUTSIDE


def _signal_of(returncode: int | None) -> str | None:
    """Of a child it is negative; the guard says it as a shell does, with 128 more."""
    number = 0 if returncode is None else -returncode if returncode < 0 else returncode - 128
    return signal.Signals(number).name if number in set(signal.Signals) else None


def find(program: str) -> str | None:
    """The program's path, or None. It looks in the administrators' folders too."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *ADMIN_PATHS])
    return shutil.which(program, path=path)


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stop: Callable[[], bool] | None = None,
    on_line: Callable[[str], None] | None = None,
    guarded: bool = False,
    runs_as: As | None = None,
    name: str | None = None,
    missing: type[SynvirtError] = Internal,
) -> Output:
    """Runs a program to its end. ProgramFailed on a bad exit, after `timeout_s`, and when it prints over
    OUTPUT_BYTES_MAX; Cancelled, once `stop()` is true.

    `env` is added to a small clean environment: the service's own may hold secrets. `on_line` gets each line of standard output
    as it comes; the output is then not kept. `guarded`: if this process dies, the program dies too; and when the program ends,
    everything that it started ends, daemons and other users' processes included. `name`: the program's name, if another program
    starts it.
    """
    name = name or Path(argv[0]).name
    found = [refuse_missing(argv[0], missing), *argv[1:]]
    with contextlib.ExitStack() as held:
        if guarded:
            found = [sys.executable, "-I", "-S", str(GUARD), *found]
        # A file, not a pipe: a daemon that the program leaves behind may hold a pipe open, and reading it would never end.
        messages = held.enter_context(tempfile.TemporaryFile())
        lines = held.enter_context(_Lines(on_line)) if on_line else None
        life = held.enter_context(_LifeLine()) if guarded else None
        child = subprocess.Popen(
            found,
            stdin=life.theirs if life else subprocess.DEVNULL,
            stdout=lines.write_end if lines else subprocess.PIPE,
            stderr=messages,
            env=_environment(env),
            cwd=cwd,
            start_new_session=True,
            user=runs_as.uid if runs_as else None,
            group=runs_as.gid if runs_as else None,
            extra_groups=runs_as.groups if runs_as else None,
        )
        held.callback(_let_go, child)
        try:
            if lines:
                lines.started()
            stdout, ended = _end_of(child, time.monotonic() + timeout_s, stop)
        finally:
            if child.returncode is None or child.returncode < 0:
                _end(child, life)
        stderr = _tail(messages)
    if ended is not None or child.returncode != 0:
        raise ProgramFailed(name, None if ended else child.returncode, stderr, ended=ended)
    return Output(_text(stdout), stderr)


def _text(output: bytes) -> str:
    return output.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def _end_of(child: "subprocess.Popen[bytes]", deadline: float, stop: Callable[[], bool] | None) -> tuple[bytes, str | None]:
    """The program's output; and None, if it has ended by itself, else why it has to be ended."""
    output = bytearray()
    while True:
        until = deadline if stop is None else min(deadline, time.monotonic() + STOP_POLL_S)
        is_all = child.stdout is None or _is_all_read(child.stdout, output, until)
        if len(output) > OUTPUT_BYTES_MAX:
            return b"", f"printed over {OUTPUT_BYTES_MAX >> 20} MiB"
        with contextlib.suppress(subprocess.TimeoutExpired):
            if is_all:
                child.wait(max(0, until - time.monotonic()))
                return bytes(output), None
        if stop is not None and stop():
            raise Cancelled
        if time.monotonic() >= deadline:
            return b"", "took too long"


def _is_all_read(stream: IO[bytes], output: bytearray, until: float) -> bool:
    """Reads until the end of the stream, until that time, or until it is too much. Whether the stream has ended."""
    ready = select.poll()
    ready.register(stream.fileno(), select.POLLIN)
    while len(output) <= OUTPUT_BYTES_MAX and ready.poll(max(0, until - time.monotonic()) * 1000):
        piece = os.read(stream.fileno(), OUTPUT_READ_BYTES)
        if not piece:
            return True
        output += piece
    return False


def _end(child: "subprocess.Popen[bytes]", life: "_LifeLine | None") -> None:
    """Lets the guard end the program, whose processes may be in other groups; then ends what still runs of the group, as where
    something else has ended the guard, or the program itself."""
    if life is not None:
        life.cut()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GONE_TIMEOUT_S)
    # Although it may have been waited for a moment ago: while any of the group runs, its number is no other's.
    _kill_group(child)


def _let_go(child: "subprocess.Popen[bytes]") -> None:
    """Waits for the end of a program that was ended, GONE_TIMEOUT_S at most. No signal ends one that waits in the kernel for a
    disk, as zfs does for a suspended pool."""
    if child.stdout is not None:
        child.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GONE_TIMEOUT_S)


def _tail(messages: IO[bytes]) -> str:
    messages.seek(max(0, messages.seek(0, os.SEEK_END) - STDERR_READ_BYTES))
    return messages.read().decode(errors="replace")


class _LifeLine:
    """A pipe whose end the guard reads. It closes when this process ends, for any reason, or when it is cut."""

    def __enter__(self) -> "_LifeLine":
        self.theirs, self._ours = os.pipe()
        self._whole = True
        return self

    def cut(self) -> None:
        if self._whole:
            self._whole = False
            os.close(self._ours)

    def __exit__(self, *_: object) -> None:
        os.close(self.theirs)
        self.cut()


class _Lines:
    """Reads a child's output line by line, in its own thread. An error of `on_line` is raised when the child has ended."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._error: BaseException | None = None
        read_end, self.write_end = os.pipe()
        self._stream = os.fdopen(read_end, encoding="utf-8", errors="replace")
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "_Lines":
        return self

    def started(self) -> None:
        """Closes our copy of the write end: the child has its own, and reading ends only when both are closed."""
        self._thread.start()  # first: there may be no memory for it, and a number closed twice may be another's file by then
        os.close(self.write_end)

    def _read(self) -> None:
        with self._stream:
            # A program that never ends its line is read in pieces.
            while line := self._stream.readline(LINE_KEPT_CHARS):
                try:
                    self._on_line(line.rstrip("\n"))
                except BaseException as error:
                    self._error = self._error or error

    def __exit__(self, kind: object, *_: object) -> None:
        if self._thread.ident is None:
            os.close(self.write_end)
            self._stream.close()
        else:
            self._thread.join(LINES_LATE_S)
        if kind is None and self._error is not None:
            raise self._error


def start(
    argv: Sequence[str],
    *,
    stderr: Path,
    descriptors: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    missing: type[SynvirtError] = Internal,
) -> "subprocess.Popen[bytes]":
    """Starts a program that serves until `end_group` ends it, or until this process ends, however it ends. Its messages go to
    `stderr`; it inherits `descriptors`. `env` is added to a small clean environment."""
    found = [refuse_missing(argv[0], missing), *argv[1:]]
    bound = [refuse_missing("setpriv", missing), "--pdeathsig", "KILL", *found]
    with stderr.open("wb") as messages:
        begun = _lasting_thread().submit(
            subprocess.Popen,
            bound,
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=messages,
            env=_environment(env),
            pass_fds=descriptors,
            start_new_session=True,
        )
        return begun.result()


@cache
def _lasting_thread() -> "ThreadPoolExecutor":
    """The kernel ends such a child when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG). This thread lives as long
    as the process."""
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1, thread_name_prefix="programs")


@dataclass(frozen=True, slots=True)
class Begun:
    """A running program whose output is read later. It ends with this process, as its reader is then gone. `messages`: its
    standard error."""

    child: "subprocess.Popen[bytes]"
    messages: IO[bytes]


def begin(argv: Sequence[str], *, missing: type[SynvirtError] = Internal) -> Begun:
    """Starts a program whose output is read later, by `output_of`: for example in a cage, where no program may be started."""
    messages = tempfile.TemporaryFile()  # noqa: SIM115 - the reader of the output closes it
    child = subprocess.Popen(
        [refuse_missing(argv[0], missing), *argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        bufsize=OUTPUT_BUFFER_BYTES,
        stderr=messages,
        env=_environment(None),
        start_new_session=True,
    )
    return Begun(child, messages)


@contextlib.contextmanager
def output_of(begun: Begun, *, timeout_s: float) -> Iterator[IO[bytes]]:
    """The program's output as a stream, with a time limit. At the end of the block: ProgramFailed, if the program failed.
    Leaving the block before the output has ended ends the program."""
    child = begun.child
    with begun.messages as messages:
        assert child.stdout is not None
        deadline = threading.Timer(timeout_s, end_group, [child])
        ended = False
        try:
            deadline.start()
            yield child.stdout
            ended = not child.stdout.read(1)
        finally:
            deadline.cancel()
            if not ended:
                end_group(child)
            child.stdout.close()
            child.wait()
        if ended and child.returncode != 0:
            raise ProgramFailed(Path(str(child.args[0])).name, child.returncode, _tail(messages))  # type: ignore[index]


def refuse_forbidden(program: str, missing: type[SynvirtError] = Internal) -> None:
    """Raises `missing` in a test or a process that may start no programs."""
    if forbidden:
        refused.append(program)
        raise missing(f"the program {program} may not be started here")


def refuse_missing(program: str, missing: type[SynvirtError] = Internal) -> str:
    """The program's path. `missing`, if it is not installed."""
    refuse_forbidden(program, missing)
    path = find(program)
    if path is None:
        raise missing(f"the program {program} is not installed", hint="run `synvirt doctor`: it names the package")
    return path


def inherited(names: Iterable[str]) -> dict[str, str]:
    """These variables of this process, for the environment of a child: the whole of it may hold secrets."""
    return {name: os.environ[name] for name in names if name in os.environ}


def _environment(added: Mapping[str, str] | None) -> dict[str, str]:
    """A small clean environment."""
    return {**inherited(("PATH", "HOME", "LANG", "TMPDIR")), "LC_ALL": "C.UTF-8", **(added or {})}


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """Ends a child started with start_new_session, and all its children, by SIGKILL: readers have nothing to tidy up. In a cage
    that blocks signals (Landlock from Linux 6.12 on), a child started before ends when its output is not read any more.
    One that was waited for is left: its number may be another process's by now."""
    if child.returncode is None:
        _kill_group(child)


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def end_users(folder: Path) -> None:
    """Ends every process that has a file in `folder` open, except ourselves. virt-v2v serves disks by qemu-nbd, a daemon in its
    own session, which stays when virt-v2v fails or is killed."""
    folder = folder.resolve()  # the kernel names open files so
    for process in Path("/proc").glob("[0-9]*"):
        # A process that ends during this, or belongs to another user, has no file of ours open.
        with contextlib.suppress(OSError):
            theirs = any(_is_in(folder, link) for link in (process / "fd").iterdir())
            if theirs and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)
                _wait_gone(process)


def _is_in(folder: Path, link: Path) -> bool:
    try:
        return link.readlink().is_relative_to(folder)
    except FileNotFoundError:  # closed meanwhile: what else the process has open is looked at all the same
        return False


def _wait_gone(process: Path) -> None:
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while (process / "fd").exists() and any((process / "fd").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
