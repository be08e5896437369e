"""What the service and an exporter agree on: its order, the files of its folder, its cage. `exports.py` starts and ends it.

A module of its own, which imports little: a guest waits while an exporter starts.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from synvirt.cage import Cage, Network
from synvirt.disks.specs import FileWriterSpec, ReaderSpec
from synvirt.jobs.caging import cage_of
from synvirt.jobs.orders import CopyOrder, DiskOrder
from synvirt.jobs.wire import Order
from synvirt.repository.specs import PointSpec

LOCK, ACTIVITY = "lock", "activity"
# The bytes of the lock.
LIVES, SERVES = 0, 1

# A disk of a source, or of a restore point.
Exported = ReaderSpec | PointSpec


class ExportOrder(Order):
    """`disks`: the n-th is served on the socket `n` in `folder`."""

    kind: Literal["export"] = "export"
    folder: str
    disks: tuple[Exported, ...]


def cage_of_export(order: ExportOrder, cage_of: Callable[[CopyOrder], Cage] = cage_of) -> Cage:
    """The exporter's cage: it may read the files of its readers and make sockets in its folder. `cage_of`: what readers
    need."""
    nowhere = FileWriterSpec(path=os.devnull, size_bytes=0)
    disks = tuple(DiskOrder(key=str(number), reader=spec, writer=nowhere) for number, spec in enumerate(order.disks))
    own = cage_of(CopyOrder(disks=disks))
    return replace(own, writes=(*own.writes, order.folder), network=own.network | Network.LOCAL)
