"""The interface of an outside program that imports a whole VM, for any kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Passthrough(Protocol):
    """The other way to import an offline kind: one full import instead of reading each disk. Blocking.

    - `serves()`: whether it is used on this host. InvalidPlan, where it is required and does not work.
    - `import_into(name, source, wanted_bytes, moved, stop)`: writes the VM at `source` as raw files, about `wanted_bytes` of
      them, into a folder of that name, which each call makes again; durable on return. Calls `moved` with the part that is
      done, 0 to 1. DiskReadFailed, DiskWriteFailed, Cancelled. If this process dies, the program dies too.
    - `disks(name)`: the files that it made, in no particular order.
    - `discard(name)`: removes all of that name. Idempotent.
    """

    def serves(self) -> bool: ...
    def import_into(
        self, name: str, source: Path, wanted_bytes: int, moved: Callable[[float], None], stop: Callable[[], bool]
    ) -> None: ...
    def disks(self, name: str) -> list[Path]: ...
    def discard(self, name: str) -> None: ...
