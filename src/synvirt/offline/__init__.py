"""Offline importers, a file or a package per kind: each finds the VM's description and its disks. Blocking code.

`registry.IMPORTERS` is the registry; the contract suite tests every importer in it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from synvirt.disks.specs import ChecksumSpec, ReaderSpec

if TYPE_CHECKING:  # the command line uses `known_by` to tell raw disks from appliances, and does not wait for pydantic
    from synvirt.disks.roots import Root
    from synvirt.model.kinds import OfflineKind
    from synvirt.model.machine import VmManifest


class OpenedDisk(NamedTuple):
    """How to read one disk, and what to check in the same pass."""

    reader: ReaderSpec
    checksums: tuple[ChecksumSpec, ...] = ()


class OfflineImporter(Protocol):
    """One offline kind.

    - `probe(path, head, root)`: whether it is this importer's file or folder (`head`: its first 64 KiB; empty for a folder).
      Never raises.
    - `inspect(path, root)`: the whole manifest; reads what it needs, but no disks. MalformedArchive says where.
    - `open_disk(path, root, disk_key)`: how the copy worker reads that disk. The answer for the same file is the same, as it is
      asked again after a crash.
    `path` was resolved under `root`, the import root or a folder elsewhere (see `roots`); files named inside the archive must
    lie below it too.
    """

    @property
    def kind(self) -> "OfflineKind": ...

    def probe(self, path: Path, head: bytes, root: "Root" = ...) -> bool: ...
    def inspect(self, path: Path, root: "Root") -> "VmManifest": ...
    def open_disk(self, path: Path, root: "Root", disk_key: str) -> OpenedDisk: ...
