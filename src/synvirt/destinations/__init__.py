"""Destinations: where volumes are made. Blocking code, one file for each kind."""

import threading
from functools import partial
from typing import ClassVar, Final, Protocol
from uuid import UUID
from weakref import WeakKeyDictionary, ref

from synvirt.disks.specs import WriterSpec
from synvirt.errors import DiskReadFailed, DiskWriteFailed
from synvirt.kvm import limit

# The pauses before what needs a destination that is away is tried again; the last one repeats. A host that has restarted mounts
# a file system, or imports a pool, after the service is up.
AWAY_PAUSES_S: Final = (5.0, 10.0, 30.0, 60.0)
# How long a destination is waited for before it counts as away. A pool of zfs or Ceph that is busy answers within seconds.
ANSWERS_S = 30.0


class DestinationAway(DiskWriteFailed):
    """Its file system is not mounted, or its pool is not imported: no volume can be made, and none counts as gone."""


class Destination(Protocol):
    """Makes and removes the volumes of jobs. All failures are DiskWriteFailed with the cause; DestinationAway, where it may
    come back with all that is in it.

    - `volume_name(job_id, label)`: the volume's name, made only from these two; different labels give different names.
    - `create(name, size_bytes)`: makes a volume that reads as zeros. Called again with the same name and size, it leaves the
      volume and its bytes as they are.
    - `is_there(name)`: whether there is a volume of that name, made to its end. A volume that was removed has lost its bytes,
      and `create` makes an empty one in its place: ask before, where something was copied onto it.
    - `open(name, size_bytes)`: how the copy worker writes an existing volume, and reads it back; `device(name)`: the path that
      a domain opens. Both may wait until the host shows the volume's device.
    - `destroy(name)`: removes the volume; idempotent. It never touches what this destination did not make.
    - `why_no_clones()`: why volumes here cannot be cloned, as a sentence. None: they can.
    - `clone(name, to)`: makes `to`, which `volume_name` gave for another job, a volume that reads as `name` does now. They
      share their bytes: none is copied. From then on neither sees what is written to the other. An earlier clone of that name
      is replaced. A volume with a part aside (see `backing_file`) must be opened and closed by a worker first, which folds it.
    - `backing_file(name, to)`: None: the clone is raw, and complete by itself. Else it is an overlay in qcow2, and this is the
      path of its backing file, the raw volume, which stays as it is until `unclone`: what is written to `open(name)` lies
      aside meanwhile, and is folded into the volume by the next open after that.
    - `release(name)`: from now on the volume itself is written, even if that breaks clones of it. What was kept aside and is
      folded by now is removed. Idempotent.
    - `unclone(name, to)`: removes that clone, and what was kept of `name` for it; idempotent. `name` stays as it is. A volume
      that has clones may not be destroyed.
    - `shared_id()`: the name of this place on every host that reaches it. None: only this host reaches it.
    - `free_bytes()`: how much can still be written, so that a plan that cannot fit is refused before the first byte. Ask by
      `free_bytes_of`.
    """

    kind: ClassVar[str]
    # How a domain's XML names the volume: a file, or a block device.
    device_type: ClassVar[str]

    def volume_name(self, job_id: UUID, label: str) -> str: ...
    def create(self, name: str, size_bytes: int) -> None: ...
    def is_there(self, name: str) -> bool: ...
    def open(self, name: str, size_bytes: int) -> WriterSpec: ...
    def device(self, name: str) -> str: ...
    def destroy(self, name: str) -> None: ...
    def why_no_clones(self) -> str | None: ...
    def clone(self, name: str, to: str) -> None: ...
    def backing_file(self, name: str, to: str) -> str | None: ...
    def release(self, name: str) -> None: ...
    def unclone(self, name: str, to: str) -> None: ...
    def shared_id(self) -> str | None: ...
    def free_bytes(self) -> int: ...


_asked: WeakKeyDictionary[Destination, limit.Single[int]] = WeakKeyDictionary()
_asked_lock = threading.Lock()


def free_bytes_of(destination: Destination, within_s: float | None = None) -> int:
    """How much can still be written. DiskWriteFailed; DestinationAway, also where it does not answer `within_s`, by default
    ANSWERS_S."""
    limit_s = ANSWERS_S if within_s is None else within_s
    with _asked_lock:
        if (asked := _asked.get(destination)) is None:
            # It must not keep the destination.
            asked = _asked[destination] = limit.Single(partial(_free_bytes, ref(destination)))
    try:
        return asked.within(limit_s)
    except TimeoutError:
        raise _silent(limit_s) from None


def free_bytes_shown(destination: Destination) -> int:
    """The same for who only shows it, and should not wait."""
    return free_bytes_of(destination, limit.FOLDER_ANSWERS_S)


def shared_id_of(destination: Destination) -> str | None:
    """Its `shared_id()`. DiskWriteFailed; DestinationAway, also where it does not answer for ANSWERS_S."""
    try:
        return limit.within(ANSWERS_S, destination.shared_id)
    except TimeoutError:
        raise _silent(ANSWERS_S) from None


def _silent(within_s: float) -> DestinationAway:
    hint = "look whether the server of its file system, or its cluster, is up"
    return DestinationAway(f"the destination did not answer for {within_s:g} s", hint=hint)


def _free_bytes(asked: "ref[Destination]") -> int:
    destination = asked()
    assert destination is not None  # its asker has it
    return destination.free_bytes()


def as_away(destination: Destination, error: DiskWriteFailed | DiskReadFailed) -> DiskWriteFailed | DiskReadFailed:
    """What to raise for an error of a copy to this destination: DestinationAway, where it went away meanwhile. A program that
    writes there sees an input/output error then, or no such file."""
    if not isinstance(error, DestinationAway):
        try:
            free_bytes_of(destination)
        except DestinationAway as away:
            return away
        except DiskWriteFailed:
            pass
    return error
