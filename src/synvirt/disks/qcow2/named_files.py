"""The other files a qcow2 image names: its backing file and its external data file.

The image's maker chose both names, so only `roots` opens them, in the import root. The backing file has the format that the
image names. If it names none, a guest may have written the file's first bytes: a guest that writes a qcow2 header into its raw
disk must not choose the next file. So a file without a known magic is a raw disk, a qcow2 image is accepted if it names no
further file, and anything else is refused (as in libvirt).
"""

from collections.abc import Callable, Hashable
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from synvirt.blocks import DiskReader
from synvirt.disks.entries import WindowCache
from synvirt.disks.formats import ImageOpeners, image_format
from synvirt.disks.qcow2.entries import Words
from synvirt.disks.qcow2.header import L1_BYTES_MAX, Header, read_header
from synvirt.disks.roots import Root, open_reference
from synvirt.disks.specs import ImageFormat, ImageSpec, RawSpec
from synvirt.errors import HostPathRejected, MalformedArchive, UnsupportedFormat

# ESXi stops at 32. Each file needs an open descriptor, and some of the 1000 nested calls that Python allows.
CHAIN_MAX = 64
# The L1 tables of a whole chain are kept in memory: an honest 1 TiB layer has 16 KiB of them.
_CHAIN_L1_BYTES_MAX = 2 * L1_BYTES_MAX

_REBASE = (
    "Copy the backing file into the image's folder, and let the image name it without a path: "
    "`qemu-img rebase -u -b BACKING_FILE -F ITS_FORMAT IMAGE`."
)

# QEMU's names of formats, and ours. Old versions wrote `file` for raw.
_RAW_FORMATS = frozenset({"raw", "file"})
_IMAGE_FORMATS: dict[str, ImageFormat] = {"qcow2": "qcow2", "vmdk": "vmdk", "vhdx": "vhdx", "vpc": "vhd", "vdi": "vdi"}


class Chain(NamedTuple):
    """An image's place in a backing chain: its path under `root` (no root: it may name no file), and the images above it.
    `images`: what opens a backing file of another format."""

    cache: WindowCache[Words]
    root: Root | str | None = None
    name: str = ""
    files: frozenset[Hashable] = frozenset()
    depth: int = 0
    l1_bytes: int = 0
    images: ImageOpeners = MappingProxyType({})

    def within(self, header: Header) -> "Chain":
        """This chain, with the image's own tables counted. MalformedArchive, when the chain's are too many."""
        l1_bytes = self.l1_bytes + header.l1_entries_needed * 8
        if l1_bytes > _CHAIN_L1_BYTES_MAX:
            raise MalformedArchive(f"{self.name!r}: the L1 tables of its backing chain take over {_CHAIN_L1_BYTES_MAX} bytes")
        return self._replace(l1_bytes=l1_bytes)

    def open(self, reference: str) -> tuple[DiskReader, "Chain"]:
        """The bytes of the file that the image names as `reference`, and its chain. HostPathRejected, MalformedArchive."""
        if self.depth >= CHAIN_MAX:
            raise MalformedArchive(f"{self.name!r}: its backing chain is more than {CHAIN_MAX} files long")
        reader, name, identity = open_reference(self.root, self.name, reference)
        if identity in self.files:
            reader.close()
            raise MalformedArchive(f"{self.name!r} names {reference!r}, which names it in turn: its backing chain is a loop")
        chain = self._replace(name=name, files=self.files | {identity}, depth=self.depth + 1)
        return reader, chain


def open_data_file(chain: Chain, header: Header) -> DiskReader | None:
    """The external data file; None, where the data is in the image's own file."""
    if header.data_file is None or not header.external_data:
        return None
    return chain.open(header.data_file)[0]


def open_backing_file(chain: Chain, header: Header, open_qcow2: Callable[[DiskReader, Chain], DiskReader]) -> DiskReader | None:
    """The disk under this one; None, where there is none: then missing bytes are zeros."""
    if header.backing_file is None:
        return None
    try:
        file, below = chain.open(header.backing_file)
    except (HostPathRejected, MalformedArchive) as problem:
        if chain.root is None or not header.backing_file.startswith("/"):
            raise
        # As libvirt names the disk under a snapshot. No other file of that name is taken: nothing tells it from the right one.
        raise type(problem)(f"{chain.name!r} needs its backing file: {problem.detail}", hint=_REBASE) from problem
    try:
        return _opened(file, below, header.backing_format, open_qcow2)
    except BaseException:
        file.close()
        raise


def _opened(
    file: DiskReader, chain: Chain, named: str | None, open_qcow2: Callable[[DiskReader, Chain], DiskReader]
) -> DiskReader:
    if named is None:
        named = _unambiguous_format(file, chain.name)
    if named in _RAW_FORMATS:
        return file
    if named == "qcow2":
        return open_qcow2(file, chain)
    known = _IMAGE_FORMATS.get(named)
    opener = chain.images.get(known) if known is not None else None
    if known is None or opener is None:
        raise UnsupportedFormat(f"the backing file {chain.name!r} is a {named!r} image, which is not read")
    root = str(chain.root) if isinstance(chain.root, Path) else chain.root
    return opener(file, ImageSpec(format=known, over=RawSpec(path=chain.name), root=root, name=chain.name))


def _unambiguous_format(file: DiskReader, name: str) -> str:
    found = image_format(file)
    if found is None:
        return "raw"
    if found == "qcow2":
        header = read_header(file, name)
        if header.backing_file is None and not header.external_data:
            return "qcow2"
    raise UnsupportedFormat(
        f"the backing file {name!r} begins like a {found} image, and the image above it does not say its format",
        hint=f"If you trust its content, say so in the image above it: qemu-img rebase -u -b {name} -F FORMAT IMAGE",
    )
