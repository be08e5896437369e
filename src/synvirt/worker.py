"""The worker process, `python -m synvirt.worker`: which kinds of orders there are, and how to open what they name.

Besides `main`, this is the only module that names concrete things. It imports little: a worker may start while a guest waits.
"""

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from synvirt.disks import open_reader, open_writer
from synvirt.jobs.caging import cage_of, cage_of_repair
from synvirt.jobs.copying_disks import Openers, copy_disks
from synvirt.jobs.orders import CopyOrder, RepairOrder
from synvirt.jobs.wire import Wire
from synvirt.jobs.worker import Task, Tasks, main
from synvirt.repository.specs import PointSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from synvirt.blocks import DiskReader
    from synvirt.cage import Cage
    from synvirt.disks.passed import Pace
    from synvirt.disks.specs import ReaderSpec
    from synvirt.repository.opening import OpenRepositories


def _copy(order: CopyOrder, wire: Wire) -> None:
    if any(isinstance(disk.reader, PointSpec) for disk in order.disks):
        from synvirt.repository.opening import OpenRepositories

        with OpenRepositories() as repositories:
            copy_disks(order, wire, Openers(reader=partial(_open, repositories), writer=open_writer))
    else:
        copy_disks(order, wire, Openers(reader=partial(_open, None), writer=open_writer))


def _cage(order: CopyOrder) -> "Cage":
    if not any(isinstance(disk.reader, PointSpec) for disk in order.disks):
        return cage_of(order)
    from synvirt.backups.worker.caging import cage_of_restore

    return cage_of_restore(order)


def _repair(order: RepairOrder, wire: Wire) -> None:
    from synvirt.jobs.repairing_disks import repair_disks

    repair_disks(order, wire, Openers(reader=partial(_open, None), writer=open_writer))


def _open(repositories: "OpenRepositories | None", spec: "ReaderSpec | PointSpec", pace: "Pace | None" = None) -> "DiskReader":
    if not isinstance(spec, PointSpec):
        return open_reader(spec, pace)
    assert repositories is not None
    return repositories.point(spec)


def _of_backups(name: str) -> "Callable[[], Task[Any]]":
    def load() -> Task[Any]:
        from synvirt.backups.worker.tasks import TASKS

        return TASKS[name]

    return load


TASKS: Tasks = {
    "copy": lambda: Task(CopyOrder, _copy, _cage),
    "repair": lambda: Task(RepairOrder, _repair, cage_of_repair),
    **{name: _of_backups(name) for name in ("take", "verify_point", "verify_repository", "collect", "serve", "measure")},
}

if __name__ == "__main__":
    # Everything is durable and reported. A normal exit of the interpreter takes 40 ms, and the service or a stopped guest
    # waits.
    os._exit(main(TASKS, silence_s=float(sys.argv[1]) if sys.argv[1:] else None))
