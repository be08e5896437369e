"""The disks of a source or a restore point as NBD exports, each on a Unix socket, for a guest that runs on them. They outlive
the service.

    serve(folder, disks) ─▶ `python -m synvirt.exporter` ─▶ caged, serving, detached: no process waits for it
    folder/lock             locked while the exporter lives: so it is found again, and no later process with its number is
                            mistaken for it; the second byte is locked once all disks are served
    folder removed          it ends by itself

Exports are read-only, so they need no lease: the host that has the job ends them, or finds them and goes on. Blocking code.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from synvirt.cage.scratch import sweep_of
from synvirt.errors import DiskReadFailed, Internal, from_code
from synvirt.jobs.exporting import LIVES, LOCK, SERVES, Exported, ExportOrder
from synvirt.jobs.process import ENVIRONMENT
from synvirt.jobs.wire import Broken
from synvirt.kvm import qemu_user
from synvirt.programs import inherited

# Seconds to open the disks, which may be on a remote server.
SERVED_WITHIN_S = 60.0
GONE_WITHIN_S = 10.0
# How long one that a guest could not read from has served before it is made anew.
RENEWED_AFTER_S = 30.0
LOOK_EVERY_S = 0.02
# struct flock of 64-bit Linux (fcntl_locking(2)): type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")


class Exports(Protocol):
    """- `folder(name)`: the folder of the sockets of that name's exports; its path is short enough for a socket. Its parent
      folder belongs to that name too, and not to an exporter.
    - `serve(name, disks)`: on return the disks are served, by a process that serves them already or by a new one, and the
      guest's QEMU may open the sockets. Raises the error of a disk that cannot be opened.
    - `renew(name)`: ends the process that serves them, unless it is new: the next `serve` makes another one, which may read
      what this one cannot, as the files of a file system that was mounted anew since.
    - `end(name)`: ends them, so that nothing of them is left. Idempotent."""

    def folder(self, name: str) -> Path: ...
    def serve(self, name: str, disks: Sequence[Exported]) -> None: ...
    def renew(self, name: str) -> None: ...
    def end(self, name: str) -> None: ...


class ProcessExports:
    """`root` is called when it is needed, as making it may need a link. `give` gives a socket to the user that QEMU runs as."""

    def __init__(self, root: Callable[[], Path], *, give: Callable[[Path], None] = lambda path: None) -> None:
        self._root, self._give = root, give

    def folder(self, name: str) -> Path:
        return self._root() / name / "served"

    def serve(self, name: str, disks: Sequence[Exported]) -> None:
        folder = self.folder(name)
        try:
            # QEMU may run as another user, who must get through this folder. Each entry in it has its own rights.
            for one in (folder.parent.parent, folder.parent, folder):
                one.mkdir(parents=True, exist_ok=True, mode=0o711)
                qemu_user.open_own(one)  # adds the rights that the service's umask removed
            (folder / LOCK).touch(mode=0o600)
            if not _is_served(folder):
                _start(ExportOrder(folder=str(folder), disks=tuple(disks)))
        except OSError as error:  # of the folder; or there are no more processes, or no more descriptors
            raise Internal(f"the guest's disks cannot be served: {error.strerror}") from error
        # At each call: the service that started the exporter may have ended before it gave the sockets away.
        for number in range(len(disks)):
            self._give(folder / str(number))

    def renew(self, name: str) -> None:
        folder = self.folder(name)
        try:
            since = (folder / "0").lstat().st_mtime  # the process has made it
        except OSError:
            return
        if not 0 <= time.time() - since < RENEWED_AFTER_S:
            _end(folder)

    def end(self, name: str) -> None:
        if not name:
            raise ValueError("an export has a name")
        folder = self.folder(name)
        _end(folder)
        try:
            if folder.parent.exists():
                shutil.rmtree(folder.parent)
        except OSError as error:
            raise Internal(f"what served the guest's disks cannot be removed: {error.strerror}") from error


def _is_served(folder: Path) -> bool:
    """Whether an exporter serves there. It waits for one that was just started by a service that has ended since."""
    deadline = time.monotonic() + SERVED_WITHIN_S
    while holder(folder) is not None:
        if holder(folder, SERVES) is not None:
            return True
        if time.monotonic() > deadline:
            raise _too_late(folder)
        time.sleep(LOOK_EVERY_S)
    return False


def _too_late(folder: Path) -> DiskReadFailed:
    """The error of disks that do not open. Ends the exporter that hangs over them: the next one would only wait for it."""
    if (hanging := holder(folder)) is not None and holder(folder, SERVES) is None:
        _kill(hanging)
    return DiskReadFailed(f"the disks of the source do not open within {SERVED_WITHIN_S:g} s")


def _end(folder: Path) -> None:
    """Ends the process that serves there. Internal."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (process := holder(folder)) is not None:
        _kill(process)
        if time.monotonic() > deadline:
            raise Internal(f"the process {process} that serves the guest's disks does not end")
        time.sleep(0.01)
        if holder(folder) != process:
            sweep_of(process)


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(process, signal.SIGKILL)


def holder(folder: Path, byte: int = LIVES) -> int | None:
    """The process that serves there, by its record lock. A file with its number could name another process by now."""
    try:
        with (folder / LOCK).open("r+b") as file:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
            kind, *_, process = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except FileNotFoundError:
        return None
    return None if kind == fcntl.F_UNLCK else int(process)


def _start(order: ExportOrder) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "synvirt.exporter"],
            input=order.to_line(),
            capture_output=True,
            timeout=SERVED_WITHIN_S,
            check=False,
            start_new_session=True,
            env=inherited(ENVIRONMENT),
        )
    except subprocess.TimeoutExpired as error:
        raise _too_late(Path(order.folder)) from error
    if done.returncode == 0:
        return
    try:
        broken = Broken.from_line(done.stdout.strip())
    except ValueError:
        message = done.stderr.decode(errors="replace").strip()[-500:]
        raise Internal(f"the process that serves the guest's disks ended with {done.returncode}: {message}") from None
    raise from_code(broken.code, broken.detail, broken.hint)
