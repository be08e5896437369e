"""Python programs that tests start, forked from a process that has loaded their modules (`forking.py`).

    Popen([sys.executable, "-m", "synvirt", "serve", …])      as subprocess has it; `run` too
    in_shell("synvirt import …", folder, timeout=100)          as a user pastes it

A service loads modules for a second of a processor and more, and tests start some hundreds. A fork is a process of its own all
the same. How Python itself starts one is seen where tests call `subprocess`: real/test_logs.py, cli/test_interrupts.py.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, AnyStr

CHECKOUT = Path(__file__).resolve().parents[2]
ASKING = Path(__file__).with_name("asking.py")
ANSWER_BYTES = 100

_lock = threading.Lock()
_ordering: list[socket.socket] = []
_forking: list[int] = []
_used_s: list[float] = []
# (the process that ordered it, its own id) for each forked program that was not waited for yet.
_begun: set[tuple[int, int]] = set()


def processor_s() -> float:
    """The processor seconds of the forked programs that have ended. They are no children of this process, so the kernel does
    not count them for it."""
    return sum(_used_s)


def begun() -> list[int]:
    """The processes that this one had forked for it, and whose end it does not know yet."""
    return [pid for owner, pid in list(_begun) if owner == os.getpid()]


def forking() -> list[int]:
    """The process that they are forked from, once there is one."""
    return _forking


def ordering() -> socket.socket:
    """Where orders go. A process that was forked has the one that it was ordered by."""
    if not _ordering:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-m", "tests.running.forking", str(theirs.fileno())]
            process = subprocess.Popen(argv, cwd=CHECKOUT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        _ordering.append(ours)
        _forking.append(process.pid)
        atexit.register(ours.close)
        atexit.register(process.wait)
        atexit.register(process.kill)
    return _ordering[0]


def share() -> None:
    """All that are forked from here order by one process, which begins with the first order. It ends when they have ended."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _forking[:] = [os.fork()]
    if _forking == [0]:
        ours.close()
        if theirs.recv(1, socket.MSG_PEEK):
            os.set_inheritable(theirs.fileno(), True)
            os.chdir(CHECKOUT)
            os.execv(sys.executable, [sys.executable, "-m", "tests.running.forking", str(theirs.fileno())])
        os._exit(0)
    theirs.close()
    _ordering[:] = [ours]
    atexit.register(ours.close)


def inherit(descriptor: int) -> None:
    """Takes a socket for orders that another process has opened, instead of opening one."""
    _ordering[:] = [socket.socket(fileno=descriptor)]
    atexit.register(_ordering[0].close)


def _umask() -> int:
    """The umask as the kernel shows it: os.umask can only return it by setting another one, for all threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


class Popen(subprocess.Popen[AnyStr]):
    """A forked program. Its argv begins with `sys.executable -m MODULE`, or `-P -m`."""

    # What Python's own class brings, and its types leave out.
    _waitpid_lock: threading.Lock
    _close_pipe_fds: Callable[..., None]
    _handle_exitstatus: Callable[[int], None]

    def _ordered_by(self) -> socket.socket:
        return ordering()

    def _execute_child(
        self,
        args: Sequence[str | os.PathLike[str]],
        executable: None,
        preexec_fn: None,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: str | os.PathLike[str] | None,
        env: Mapping[str, str] | None,
        startupinfo: None,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: None,
        gids: None,
        uid: None,
        umask: int,
        start_new_session: bool,
        process_group: int,
    ) -> None:
        words = [os.fspath(word) for word in args]
        is_safe = words[1] == "-P"
        assert words[:1] + words[1 + is_safe :][:1] == [sys.executable, "-m"], words
        assert (executable, preexec_fn, shell, uid, gid, umask) == (None, None, False, None, None, -1)
        order = {
            "words": words[2 + is_safe :],
            "finds": None if is_safe else os.fspath(cwd or Path.cwd()),
            "passed": list(pass_fds),
            "cwd": os.fspath(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "session": start_new_session,
            "umask": _umask(),
            "by": os.getpid(),
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end: socket.socket = ours
        standard: list[int] = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        with theirs, _lock:
            control = self._ordered_by()
            descriptors = [control.fileno(), theirs.fileno(), *standard, *pass_fds]
            socket.send_fds(control, [json.dumps(order).encode()], descriptors)
        self.pid = int(self._end.recv(ANSWER_BYTES) or 0)
        if not self.pid:
            ours.close()
            raise OSError("the process that is to be forked has ended")
        _begun.add((os.getpid(), self.pid))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """As waitpid(2) answers."""
        try:
            ended = self._end.recv(ANSWER_BYTES, socket.MSG_DONTWAIT if flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        self._end.close()
        _begun.discard((os.getpid(), self.pid))
        status, used_s = ended.split() if ended else (signal.SIGKILL, 0)
        _used_s.append(float(used_s))
        return self.pid, int(status)

    def _internal_poll(self, _deadstate: object = None) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    args: Sequence[str | os.PathLike[str]],
    *,
    input: str | None = None,  # noqa: A002 - as subprocess has it
    capture_output: bool = False,
    timeout: float | None = None,
    text: bool = True,
    **named: Any,
) -> subprocess.CompletedProcess[str]:
    """Of a program that says text."""
    if input is not None:
        named["stdin"] = subprocess.PIPE
    if capture_output:
        named |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, text=text, **named) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


def in_shell(lines: str, folder: Path, *, timeout: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Lines of a document, run in the folder by a shell that ends with the first that fails. Its `synvirt` is forked, too."""
    programs, control = folder / "bin", ordering().fileno()
    programs.mkdir(exist_ok=True)
    (programs / "synvirt").write_text(f'#!/bin/sh\nexec {sys.executable} -IS {ASKING} {control} synvirt "$@"\n')
    (programs / "synvirt").chmod(0o755)
    given = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **environment}
    words = ["/bin/sh", "-eu", "-c", lines]
    return subprocess.run(
        words, cwd=folder, env=given, capture_output=True, text=True, timeout=timeout, check=False, pass_fds=[control]
    )
