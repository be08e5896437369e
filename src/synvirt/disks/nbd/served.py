"""A disk that a program of this host (qemu-nbd, nbdkit) serves by NBD while it is read.

start(argv) ─▶ its pid file is there: it serves ─▶ NbdReader on its socket ─▶ all ended in the reverse order
"""

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from synvirt.cage.scratch import scratch_folder
from synvirt.disks.nbd.reader import CONNECT_TIMEOUT_S, Dial, NbdReader, by_uri
from synvirt.errors import SourceUnreachable, SynvirtError
from synvirt.programs import ENDED_HINT, ProgramFailed, end_group, refuse_forbidden

# Enough of the output to show what went wrong.
MESSAGE_CHARS = 500
_LOOK_EVERY_S = 0.01


class Place(NamedTuple):
    """A folder that no other user may enter. The socket may exist before the disk is open, the pid file exists only after."""

    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / "socket"

    @property
    def ready(self) -> Path:
        return self.folder / "pid"

    @property
    def log(self) -> Path:
        return self.folder / "log"


def place_for(program: str, closing: contextlib.ExitStack) -> Place:
    """A new one, which is removed when `closing` is closed."""
    refuse_forbidden(program)
    return Place(closing.enter_context(scratch_folder(program)))


def reader_of(
    child: "subprocess.Popen[bytes]",
    place: Place,
    closing: contextlib.ExitStack,
    *,
    program: str,
    name: str,
    connections: int,
    timeout_s: float,
    ended: Callable[[str], SynvirtError],
    late: SynvirtError,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    leave_s: float = 0.0,
) -> NbdReader:
    """Waits until the program serves. Raises `ended(message)` where it ends instead, with its last output; `late` after
    `timeout_s`. SourceUnreachable, where something else ends it, now or while it is read: another one may read the disk.

    When `closing` is closed, the reader is closed and the program ended. A program that ends with its last reader, and must
    clean up, gets `leave_s` for it."""
    closing.callback(child.wait)
    closing.callback(end_group, child)
    deadline = time.monotonic() + timeout_s
    while not place.ready.exists():
        if child.poll() is not None:
            failed = _failed(child, program, place)
            if failed.from_outside:
                raise _gone(failed, name)
            raise ended(failed.stderr[-MESSAGE_CHARS:] or failed.detail)
        if time.monotonic() > deadline:
            raise late
        time.sleep(_LOOK_EVERY_S)
    reader = NbdReader(
        _while_it_runs(child, program, name, place), connections=connections, name=name, connect_timeout_s=connect_timeout_s
    )
    closing.callback(_let_leave, child, leave_s)
    closing.callback(reader.close)
    return reader


def _while_it_runs(child: "subprocess.Popen[bytes]", program: str, name: str, place: Place) -> Dial:
    """How to connect to it. SourceUnreachable at once, where it has ended: it does not come back."""
    connect = by_uri(f"nbd+unix:///?socket={place.socket}")

    def dial(handle: Any) -> None:
        if child.poll() is not None:
            raise _gone(_failed(child, program, place), name)
        connect(handle)

    return dial


def _failed(child: "subprocess.Popen[bytes]", program: str, place: Place) -> ProgramFailed:
    return ProgramFailed(program, child.returncode, place.log.read_text(errors="replace"))


def _gone(failed: ProgramFailed, name: str) -> SourceUnreachable:
    how = failed.cut_off or f"has ended with {failed.returncode}"
    return SourceUnreachable(
        f"{failed.program}, which reads {name}, {how}: {failed.stderr[-MESSAGE_CHARS:] or 'it printed no message'}",
        hint=ENDED_HINT,
    )


def _let_leave(child: "subprocess.Popen[bytes]", within_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(within_s)
