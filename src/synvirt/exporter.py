"""Serves the disks that a guest runs from before they are copied, `python -m synvirt.exporter`: see `jobs/exports.py`.

    order on stdin ─▶ fork: the parent waits for one line, and ends ─▶ the child: lock, cage, readers, sockets, to its end

Besides `worker`, this is the only module that opens what an order names in a process of its own.
"""

import contextlib
import fcntl
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from synvirt.cage import enter
from synvirt.cage.scratch import housed
from synvirt.disks import open_reader
from synvirt.disks.nbd.server import NbdServer
from synvirt.errors import Internal, SynvirtError, UnsupportedFormat
from synvirt.jobs.activity import Activity, Noticed
from synvirt.jobs.exporting import ACTIVITY, LIVES, LOCK, SERVES, Exported, ExportOrder, cage_of_export
from synvirt.jobs.wire import Broken
from synvirt.jobs.worker import limit_memory
from synvirt.outgoing import permit
from synvirt.repository.specs import PointSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from synvirt.blocks import DiskReader
    from synvirt.cage import Cage

# Seconds between two checks for the folder: when it is removed, this process ends.
LOOK_EVERY_S = 1.0
_SERVED = b"\n"


def main() -> int:
    """The parent's exit code: 0 once the disks are served; else 1, and why on stdout."""
    order = ExportOrder.from_line(sys.stdin.buffer.readline())
    limit_memory()
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.close(read_end)
        _serve(order, write_end)
    os.close(write_end)
    answer = b""
    while part := os.read(read_end, 1 << 16):
        answer += part
    if answer == _SERVED:
        return 0
    sys.stdout.buffer.write(answer)
    return 1


def _serve(order: ExportOrder, write_end: int) -> None:
    """Never returns."""
    try:
        lock = _locked(Path(order.folder) / LOCK)
        _silence()
        servers = _opened(order)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, SERVES)
    except BaseException as error:
        os.write(write_end, _broken(error).to_line())
        os._exit(1)
    with contextlib.suppress(BrokenPipeError):  # the service has ended; the next one finds the export
        os.write(write_end, _SERVED)
    os.close(write_end)
    own = os.fstat(lock)
    while _is(Path(order.folder) / LOCK, own):
        time.sleep(LOOK_EVERY_S)
    for server in servers:
        server.close()
    os._exit(0)


def _locked(path: Path) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, LIVES)
    except OSError as error:
        raise Internal("another process serves the guest's disks already") from error
    return lock


def _silence() -> None:
    """Closes the standard streams: they are not read any more, and no reader should wait for their end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


def _opened(order: ExportOrder) -> list[NbdServer]:
    folder = Path(order.folder)
    activity = Activity(folder / ACTIVITY)
    (folder / ACTIVITY).chmod(0o644)
    permit(order.outgoing)
    enter(housed(_cage(order)))  # before threads start, and before a byte of the source is read
    servers, open_disk = [], _opener(order)
    for number, spec in enumerate(order.disks):
        reader = open_disk(spec)
        if reader.max_readers <= 1:
            raise UnsupportedFormat("the disk comes as a stream, and a guest reads in any order")
        # Left by a killed process.
        with contextlib.suppress(FileNotFoundError):
            (folder / str(number)).unlink()
        servers.append(NbdServer(Noticed(reader, activity)))
        servers[-1].listen(folder / str(number))
    return servers


def _has_points(order: ExportOrder) -> bool:
    return any(isinstance(spec, PointSpec) for spec in order.disks)


def _cage(order: ExportOrder) -> "Cage":
    if not _has_points(order):
        return cage_of_export(order)
    from synvirt.backups.worker.caging import cage_of_restore

    return cage_of_export(order, cage_of_restore)


def _opener(order: ExportOrder) -> "Callable[[Exported], DiskReader]":
    """An opener of disks. Their repository stays open as long as this process lives."""
    if not _has_points(order):
        return open_reader  # type: ignore[return-value]
    from synvirt.repository.opening import OpenRepositories

    repositories = OpenRepositories()
    return lambda spec: repositories.point(spec) if isinstance(spec, PointSpec) else open_reader(spec)


def _broken(error: BaseException) -> Broken:
    if not isinstance(error, SynvirtError):
        error = Internal(f"the guest's disks cannot be served: {type(error).__name__}: {error}")
    return Broken(kind=type(error).__name__, code=error.code, detail=error.detail, hint=error.hint)


def _is(path: Path, own: os.stat_result) -> bool:
    """Whether it is still there. A guest runs from the disks: an error that says nothing of that ends no export."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a normal exit of the interpreter takes 40 ms, and a guest waits
