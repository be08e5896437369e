"""What an outside program that imports a whole VM must be, whatever kind it is for."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Passthrough(Protocol):
    """The other way to import an offline kind: not a loop that reads each disk, but one full import. Blocking.

    - `serves()`: is it to be used on this host? InvalidPlan, where it must be and cannot.
    - `import_into(name, source, wanted_bytes, moved, stop)`: the VM at `source` as raw files, in a folder of that name made
      again by each call; about `wanted_bytes` of them. `moved` is given the part that is done, 0 to 1. DiskReadFailed,
      DiskWriteFailed, Cancelled. Should this process die meanwhile, the program dies too.
    - `disks(name)`: the files that it made, in no order that means anything.
    - `discard(name)`: nothing of that name is left. Idempotent.
    """

    def serves(self) -> bool: ...
    def import_into(
        self, name: str, source: Path, wanted_bytes: int, moved: Callable[[float], None], stop: Callable[[], bool]
    ) -> None: ...
    def disks(self, name: str) -> list[Path]: ...
    def discard(self, name: str) -> None: ...
