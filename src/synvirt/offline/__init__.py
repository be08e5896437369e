"""Offline importers: one file a kind, each knows who the VM is and what its disks are. Blocking code.

`registry.IMPORTERS` is the literal registry; being in it enrols an importer in the contract suite.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from synvirt.disks.roots import HOST, Root
from synvirt.disks.specs import ChecksumSpec, ReaderSpec

if TYPE_CHECKING:  # `known_by` tells raw disks from appliances for the command line, which does not wait for pydantic
    from synvirt.model.kinds import OfflineKind
    from synvirt.model.machine import VmManifest


@dataclass(frozen=True, slots=True)
class OpenedDisk:
    """How to read one disk, and what to check in the same pass."""

    reader: ReaderSpec
    checksums: tuple[ChecksumSpec, ...] = ()


class OfflineImporter(Protocol):
    """One offline kind.

    - `probe(path, head, root)`: is this file or folder (`head`: its first 64 KiB; of a folder, nothing) mine? Never raises.
    - `inspect(path, root)`: the whole manifest; reads what it needs, never the disks. MalformedArchive says where.
    - `open_disk(path, root, disk_key)`: how the copy worker reads that disk. Same answer for the same file: it is asked again
      after a crash.
    `path` was resolved under `root`, the import root or a folder elsewhere (see `roots`); files named inside the archive must
    lie below it too.
    """

    @property
    def kind(self) -> "OfflineKind": ...

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool: ...
    def inspect(self, path: Path, root: Root) -> "VmManifest": ...
    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk: ...
