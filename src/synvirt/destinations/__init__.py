"""Destinations: where volumes are made. Blocking code, one file a kind."""

from typing import ClassVar, Protocol
from uuid import UUID

from synvirt.disks.specs import WriterSpec


class Destination(Protocol):
    """Makes and removes the volumes of jobs. All failures are DiskWriteFailed with the cause.

    - `volume_name(job_id, label)`: the volume's name, from these two alone; labels that differ give names that differ.
    - `create(name, size_bytes)`: a volume that reads as zeros; called again with the same name and size it is the same volume,
      its bytes untouched.
    - `open(name, size_bytes)`: how the copy worker writes it, and `device(name)`: the path a domain opens. Of a volume that was
      made; they may wait for the host to show its device.
    - `destroy(name)`: gone when it returns; idempotent; never touches what this destination did not make.
    - `why_no_clones()`: why no volume here can be cloned, as a sentence; None, where it can.
    - `clone(name, to)`: `to`, which `volume_name` gave for another job, is a volume that reads as `name` does at this moment.
      They share their bytes: none is copied. Neither sees what is written to the other from then on. A clone of that name that
      was made before is made again.
    - `unclone(name, to)`: that clone is gone, and whatever of `name` was kept for it; idempotent. `name` stays as it is. While
      it has clones it may not be destroyed.
    - `shared_id()`: what names this place on every host that reaches it; None: only this host does.
    - `free_bytes()`: what can still be written, to refuse a plan that cannot fit before the first byte.
    """

    kind: ClassVar[str]
    # How a domain's XML names the volume: a file, or a block device.
    device_type: ClassVar[str]

    def volume_name(self, job_id: UUID, label: str) -> str: ...
    def create(self, name: str, size_bytes: int) -> None: ...
    def open(self, name: str, size_bytes: int) -> WriterSpec: ...
    def device(self, name: str) -> str: ...
    def destroy(self, name: str) -> None: ...
    def why_no_clones(self) -> str | None: ...
    def clone(self, name: str, to: str) -> None: ...
    def unclone(self, name: str, to: str) -> None: ...
    def shared_id(self) -> str | None: ...
    def free_bytes(self) -> int: ...
