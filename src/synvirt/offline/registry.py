"""The offline kinds, one line each, in the order in which they examine a file."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

from synvirt.blocks import bytes_of
from synvirt.disks.roots import Root, is_folder, open_file, resolve
from synvirt.errors import UnsupportedFormat
from synvirt.model.kinds import OfflineKind
from synvirt.offline import OfflineImporter
from synvirt.offline.hyperv.export import VmcxExport
from synvirt.offline.known_by import HEAD_BYTES, TAIL_BYTES, not_read, promised
from synvirt.offline.ovf.archive import OvaArchive
from synvirt.offline.ovf.folder import OvfFolder
from synvirt.offline.single.qcow2 import Qcow2
from synvirt.offline.single.vhdx import Vhdx
from synvirt.offline.single.vmdk import Vmdk
from synvirt.offline.vbox.folder import VboxFolder
from synvirt.offline.vmx.folder import VmxFolder
from synvirt.offline.xva.archive import XvaArchive

# Archives and folders before single disks: a kind that knows more of the VM comes first.
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
_UNKNOWN = ("of an unknown kind", "A raw disk cannot be recognised by its content: qemu-img convert -f raw -O qcow2 OLD NEW.")

_EMPTY = ("empty", "Copy it again from where it comes from.")


class UnknownKind(UnsupportedFormat):
    """The file has no known magic: it may be a raw disk."""


def importer_for(kind: OfflineKind) -> OfflineImporter:
    """The importer of a kind. UnsupportedFormat, where it is not supported."""
    importer = BY_KIND.get(kind)
    if importer is None:
        raise UnsupportedFormat(f"offline kind {kind} is not served", hint=f"Supported are {', '.join(BY_KIND)}.")
    return importer


def detect(path: Path | str, root: Root) -> OfflineImporter:
    """The importer of the file or folder at `path` under `root`. HostPathRejected, NotFound, UnsupportedFormat."""
    resolved = resolve(root, str(path))
    folder = is_folder(root, resolved)
    head, tail = (b"", b"") if folder else _ends(resolved, root)
    for importer in IMPORTERS:
        if importer.probe(resolved, head, root):
            return importer
    failure: type[UnsupportedFormat] = UnsupportedFormat
    what, hint = not_read(head, tail) or ("", "")
    if folder:
        what, hint = _FOLDER
    elif not what:
        failure = UnknownKind
        what, hint = _unknown(resolved.name) if head else _EMPTY
    raise failure(f"{resolved.name or resolved} is {what}; supported kinds are {', '.join(BY_KIND)}", hint=hint or None)


def _unknown(name: str) -> tuple[str, str]:
    """The error text for a file without a known format."""
    what = promised(name)
    if what is None:
        return _UNKNOWN
    return (
        f"called {what}, and its content is not",
        "It seems to be cut off: copy it again. If it is a raw disk: qemu-img convert -f raw -O qcow2 OLD NEW.",
    )


def _ends(path: Path, root: Root) -> tuple[bytes, bytes]:
    with closing(open_file(root, str(path), shown=path.name)) as reader:
        end = min(TAIL_BYTES, reader.size)
        return bytes_of(reader, 0, min(HEAD_BYTES, reader.size)), bytes_of(reader, reader.size - end, end)
