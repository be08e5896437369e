"""The images beside a disk's file that have it as their parent: Hyper-V's checkpoints, VMware's snapshots, overlays of qcow2.

A child has what the guest wrote since the child was made. Who imports its parent by name leaves that out.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path, PureWindowsPath

from synvirt.blocks import DiskReader
from synvirt.disks.formats import image_format
from synvirt.disks.qcow2.header import read_backing_name
from synvirt.disks.roots import Root, listed, open_file
from synvirt.disks.specs import ImageFormat
from synvirt.disks.vhdx.header import read_header, read_metadata, read_regions
from synvirt.disks.vhdx.reader import PARENT_KEYS
from synvirt.disks.vmdk.reader import described
from synvirt.errors import SynvirtError

# The folder may be anyone's. Of its entries, so many are listed, and of so many the header is read.
_LISTED_MAX = 10_000
_LOOKED_AT_MAX = 64


def children_beside(path: Path, root: Root) -> list[str]:
    """The names of the images that name the file at `path` as their parent. Never raises: a file that cannot be read is none.

    Files whose names begin like the disk's come first, as each platform names its snapshots so.
    """
    try:
        names = listed(root, path.parent, _LISTED_MAX) or []
    except (OSError, SynvirtError):
        return []
    others = sorted((not name.startswith(path.stem), name) for name in names if name != path.name)
    return [name for _, name in others[:_LOOKED_AT_MAX] if path.name.lower() in _parents(path.parent / name, root)]


def _parents(path: Path, root: Root) -> set[str]:
    """What the image calls the file of its parent, without folders, in small letters. Empty, where it has none."""
    try:
        with closing(open_file(root, str(path), shown=path.name)) as file:
            image = image_format(file)
            written = _PARENTS_OF[image](file, path.name) if image in _PARENTS_OF else []
    except (OSError, SynvirtError):
        return set()
    return {PureWindowsPath(each).name.lower() for each in written}


def _of_vhdx(file: DiskReader, name: str) -> list[str]:
    """By the file itself: entries of its log that were not written yet are left out."""
    regions = read_regions(file, read_header(file, name), name)
    locator = read_metadata(file, regions.metadata, name).parent or {}
    return [locator[key] for key in PARENT_KEYS if key in locator]


def _of_vmdk(file: DiskReader, name: str) -> list[str]:
    found = described(file, name)
    return [found.parent_hint] if found is not None and found.has_parent else []


def _of_qcow2(file: DiskReader, name: str) -> list[str]:
    found = read_backing_name(file, name)
    return [] if found is None else [found]


_PARENTS_OF: Mapping[ImageFormat | None, Callable[[DiskReader, str], list[str]]] = {
    "vhdx": _of_vhdx,
    "vmdk": _of_vmdk,
    "qcow2": _of_qcow2,
}
