"""The offline kinds: a line each, in the order in which a file is asked what it is."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

from synvirt.disks.roots import Root, is_folder, open_file, resolve
from synvirt.errors import UnsupportedFormat
from synvirt.model import OfflineKind
from synvirt.offline import OfflineImporter
from synvirt.offline.known_by import HEAD_BYTES, NOT_READ
from synvirt.offline.ova_archive import OvaArchive
from synvirt.offline.ovf_folder import OvfFolder
from synvirt.offline.qcow2 import Qcow2
from synvirt.offline.vbox_folder import VboxFolder
from synvirt.offline.vhdx import Vhdx
from synvirt.offline.vmcx_export import VmcxExport
from synvirt.offline.vmdk import Vmdk
from synvirt.offline.vmx_folder import VmxFolder
from synvirt.offline.xva_archive import XvaArchive

# Archives and folders before single disks: the more a kind knows of the VM, the earlier it is asked.
IMPORTERS: tuple[OfflineImporter, ...] = (
    OvaArchive(),
    XvaArchive(),
    OvfFolder(),
    VmxFolder(),
    VboxFolder(),
    VmcxExport(),
    Vhdx(),
    Qcow2(),
    Vmdk(),
)

BY_KIND: Mapping[OfflineKind, OfflineImporter] = MappingProxyType({importer.kind: importer for importer in IMPORTERS})

_FOLDER = ("a folder without a VM", "A VM's folder has its .ovf, .vmx, .vbox, ova.xml, or the folder Virtual Machines in it.")
_UNKNOWN = ("of no kind that is known", "A raw disk has nothing to be known by: qemu-img convert -f raw -O qcow2 OLD NEW.")


class UnknownKind(UnsupportedFormat):
    """The file has nothing that it could be known by: a raw disk, for all that can be told."""


def importer_for(kind: OfflineKind) -> OfflineImporter:
    importer = BY_KIND.get(kind)
    if importer is None:
        raise UnsupportedFormat(f"offline kind {kind} is not served", hint=f"Served are {', '.join(BY_KIND)}.")
    return importer


def detect(path: Path | str, root: Root) -> OfflineImporter:
    """The importer of what lies at `path` beneath `root`. HostPathRejected, NotFound, UnsupportedFormat."""
    resolved = resolve(root, str(path))
    folder = is_folder(root, resolved)
    head = b"" if folder else _head(resolved, root)
    for importer in IMPORTERS:
        if importer.probe(resolved, head, root):
            return importer
    otherwise = _FOLDER if folder else _UNKNOWN if head else ("empty", None)
    what, hint = next(((what, hint) for magic, at, what, hint in NOT_READ if head[at : at + len(magic)] == magic), otherwise)
    failure = UnknownKind if what == _UNKNOWN[0] or not (head or folder) else UnsupportedFormat
    raise failure(f"{resolved.name or resolved} is {what}; looked for were {', '.join(BY_KIND)}", hint=hint)


def _head(path: Path, root: Root) -> bytes:
    with closing(open_file(root, str(path), shown=path.name)) as reader:
        head = bytearray(min(HEAD_BYTES, reader.size))
        reader.read_into(0, memoryview(head))
    return bytes(head)
