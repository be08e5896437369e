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
    - `destroy(name)`: gone when it returns, and what protects it too; idempotent; never touches what this destination did not
      make.
    - `free_bytes()`: what can still be written, to refuse a plan that cannot fit before the first byte.

    A step that changes a volume in place and may fail half-way (the conversion of a Windows guest) protects it first:

    - `protect(name)`: remember what the volume holds now. True: it is remembered, by this call or by an earlier one, which
      stands. False: this destination cannot, here; nothing was done. Nobody writes the volume meanwhile.
    - `roll_back(name)`: the volume holds what it held when it was protected, and stays protected; idempotent. DiskWriteFailed
      where it is not protected. Nobody has the volume open.
    - `release(name)`: forget it; the volume stays as it is. Idempotent, also for a volume that is not protected or not there.

    So that `protect, roll_back, change it, release` may be run again after a crash, from the start.
    """

    kind: ClassVar[str]
    # How a domain's XML names the volume: a file, or a block device.
    device_type: ClassVar[str]

    def volume_name(self, job_id: UUID, label: str) -> str: ...
    def create(self, name: str, size_bytes: int) -> None: ...
    def open(self, name: str, size_bytes: int) -> WriterSpec: ...
    def device(self, name: str) -> str: ...
    def destroy(self, name: str) -> None: ...
    def free_bytes(self) -> int: ...
    def protect(self, name: str) -> bool: ...
    def roll_back(self, name: str) -> None: ...
    def release(self, name: str) -> None: ...
