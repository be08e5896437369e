"""VHD images, fixed, dynamic and differencing: Microsoft's Virtual Hard Disk Image Format Specification, version 1.0 (2006).

    dynamic, differencing   │ footer's copy │ header │ BAT │ blocks: a bitmap and the data, in any order │ footer │
    fixed                   │ the disk, as it is                                                         │ footer │

Everything is big-endian, sectors have 512 bytes. The reader never writes or repairs.

The disk's size is the footer's Current Size, as for Hyper-V, Azure and VirtualBox. Virtual PC uses the footer's geometry
instead, and so does QEMU unless it knows that the creator does not. A geometry is made from the size by rounding down, so at
most the last cylinder is missing in it. To include it loses nothing; to leave it out could.

A block's bitmap says which sectors were ever written. The others are the parent's, or zeros in a dynamic image: so say the
specification, VirtualBox and Xen, and Xen leaves old contents of the storage in them. QEMU ignores the bitmaps of dynamic
images; QEMU and Hyper-V write every bit set.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from synvirt.blocks import DiskReader, bytes_of
from synvirt.disks.blockmap import PARENT, WINDOW_ENTRIES, ZERO, Bitmap, BlockMap, MappedDisk, MappedImage, Run, partly
from synvirt.disks.entries import Entries, entries_of
from synvirt.disks.guids import guid
from synvirt.disks.layers import Layer, layer_of
from synvirt.disks.parents import Chain, Reference, open_parent
from synvirt.disks.specs import ImageRoot
from synvirt.errors import MalformedArchive, UnsupportedFormat

COOKIE: Final = b"conectix"
FOOTER_BYTES: Final = 512
# Virtual PC before 2004 omitted the last byte, which is reserved.
_OLD_FOOTER_BYTES: Final = 511
_SECTOR: Final = 512
_FOOTER = struct.Struct(">8sIIQI4sI4sQQIII16sB")
_HEADER = struct.Struct(">8sQQIIII16sII512s")
HEADER_BYTES: Final = 1024
_LOCATOR = struct.Struct(">4sIIIQ")
_LOCATORS, _LOCATORS_AT = 8, _HEADER.size
FOOTER_CHECKSUM_AT, _HEADER_CHECKSUM_AT = 64, 36
_VERSION_MAJOR: Final = 1
_UNUSED: Final = 0xFFFF_FFFF
# The specification allows any power of two of sectors; real images have 2 MiB. More than this would not fit its 32-bit numbers.
_BLOCK_BYTES_MAX: Final = 1 << 31
# A path of Windows has at most 32767 characters.
_LOCATOR_BYTES_MAX: Final = 64 << 10
# Behind all that an image has there may be its footer, and what aligns that to pages.
_BEHIND_BYTES: Final = 4096
_CUT_OFF = "The file is damaged or cut off: compare its size with the original's, and copy it again."


class Kind(IntEnum):
    """Disk types of the footer; 0 means none; 1, 5 and 6 were never used."""

    FIXED = 2
    DYNAMIC = 3
    DIFFERENCING = 4


class Footer(NamedTuple):
    """The footer's fields, checked. `header_at` is the offset of a dynamic or differencing image's header; `copied`: it is the
    copy at the file's beginning, as the one at its end is missing."""

    kind: Kind
    size: int
    header_at: int
    creator: str
    identity: str
    copied: bool = False


class Header(NamedTuple):
    """The fields of a dynamic or differencing image's header, checked. `parents`: where the parent may be, best first;
    `ends_at`: where the image ends if it has no block."""

    table_at: int
    blocks: int
    block_bytes: int
    ends_at: int
    parent_identity: str
    parents: tuple[Reference, ...]

    @property
    def bitmap_bytes(self) -> int:
        """One bit per sector, in whole sectors."""
        return -(-self.block_bytes // _SECTOR // 8 // _SECTOR) * _SECTOR


class VhdReader(MappedImage):
    """The guest's disk in the VHD image whose bytes are `over`, which it owns: close() closes it, and its parent.

    `root` and `name` are ImageSpec's: the image's path under the import root. `chain` is given for images that are parents.
    """

    def __init__(self, over: DiskReader, *, root: ImageRoot | None = None, name: str = "", chain: Chain | None = None) -> None:
        self._over, self._name = over, name or "the VHD image"
        self.footer: Footer = read_footer(over, self._name)
        self.header: Header | None = None
        parent: DiskReader | None = None
        size = self.footer.size
        if self.footer.kind is Kind.FIXED:
            # One block: the disk itself, from the file's first byte on.
            whole = entries_of(bytes(4 * min(size, 1)), "I", "big")
            blocks = BlockMap(size, max(size, 1), [whole], lambda entry, _: entry, self._name, stride=0)
        else:
            self.header = read_header(over, self.footer, self._name)
            blocks = self._map(self.header, (chain or Chain()).runs)
            if self.footer.kind is Kind.DIFFERENCING:
                parent = _open_parent(root, self._name, self.header, chain or Chain(), blocks.runs_with_before)
        self._disk = MappedDisk(over, blocks, name=self._name, parent=parent, partial=self._partial)

    def _map(self, header: Header, runs_before: int) -> BlockMap:
        size, block_bytes, ahead = self.footer.size, header.block_bytes, header.bitmap_bytes
        last = 0

        def place_of(entry: int, _block: int) -> int:
            """Every block has a bitmap, so all present ones are partly present."""
            nonlocal last
            if entry == _UNUSED:
                return PARENT
            last = max(last, entry)
            return partly(entry * _SECTOR + ahead)

        windows = _windows(self._over, header)
        blocks = BlockMap(size, block_bytes, windows, place_of, self._name, stride=0, runs_before=runs_before)
        table = (header.table_at, header.table_at + header.blocks * 4, "the BAT")
        head = (self.footer.header_at, self.footer.header_at + HEADER_BYTES, "the header")
        taken = [(0, FOOTER_BYTES, "the copy of the footer"), head, table]
        blocks.check_places(self._over.size, taken, ahead=ahead)
        if self.footer.copied:
            self._refuse_more(max(header.ends_at, last and last * _SECTOR + ahead + block_bytes))
        return blocks

    def _refuse_more(self, ends_at: int) -> None:
        """Refuses an image that begins the file and is not all of it. Behind a fixed disk that was cut off no footer shows that
        its first bytes are the guest's, which may have an image there."""
        if self._over.size > ends_at + _BEHIND_BYTES:
            raise MalformedArchive(
                f"{self._name}: its beginning describes an image that ends at {ends_at}, its end has no footer, and it has "
                f"{self._over.size} bytes: they may be a fixed or raw disk, on which its guest has that image",
                hint=_CUT_OFF,
            )

    def _partial(self, run: Run) -> Iterator[Run]:
        """Each block begins with its own bitmap."""
        assert self.header is not None
        skipped = run.start % self.header.block_bytes
        begin = ~run.place - skipped - self.header.bitmap_bytes
        absent = PARENT if self.footer.kind is Kind.DIFFERENCING else ZERO
        return Bitmap(self._over, begin, _SECTOR, "big", absent).runs(run, skipped)

    def layer(self) -> Layer:
        facts: dict[str, Any] = {"subformat": self.footer.kind.name.lower(), "creator": self.footer.creator}
        if self.header is not None:
            facts["block_bytes"] = self.header.block_bytes
        return Layer(name=self._name, format="vhd", size_bytes=self.size, facts=facts, beneath=layer_of(self._disk.parent))


def _windows(over: DiskReader, header: Header) -> Iterator[Entries]:
    for first in range(0, header.blocks, WINDOW_ENTRIES):
        length = min(WINDOW_ENTRIES, header.blocks - first) * 4
        yield entries_of(bytes_of(over, header.table_at + first * 4, length), "I", "big")


def _open_parent(root: ImageRoot | None, name: str, header: Header, chain: Chain, runs: int) -> DiskReader:
    over, parent_name, chain = open_parent(root, name, header.parents, Chain(chain.files, chain.depth, runs))
    try:
        parent = VhdReader(over, root=root, name=parent_name, chain=chain)
    except BaseException:
        over.close()
        raise
    if parent.footer.identity != header.parent_identity:
        parent.close()
        raise MalformedArchive(
            f"{name} lies over an image with the identity {header.parent_identity}; {parent_name} has {parent.footer.identity}",
            hint="Copy the parent that belongs to it: one that was changed or made again does not fit.",
        )
    return parent


def read_footer(over: DiskReader, name: str) -> Footer:
    """The footer at the file's end; or, if that one is damaged, its copy at the beginning, which fixed images lack (`copied`).

    The end comes first: in a fixed image the guest controls the beginning, and may write something like a footer there.
    """
    found = []
    for at, length in ((over.size - FOOTER_BYTES, FOOTER_BYTES), (over.size - _OLD_FOOTER_BYTES, _OLD_FOOTER_BYTES), (0, 512)):
        if 0 <= at <= over.size - length:
            content = bytes_of(over, at, length).ljust(FOOTER_BYTES, b"\0")
            if content.startswith(COOKIE):
                found.append((at, content))
    for at, content in found:
        if checksum_is_right(content, FOOTER_CHECKSUM_AT):
            footer = parse_footer(content, name)
            if footer.kind is not Kind.FIXED or footer.size <= at:
                return footer._replace(copied=at == 0)
            raise MalformedArchive(f"{name}: a fixed disk of {footer.size} bytes, of which the file has {at}", hint=_CUT_OFF)
    if found:
        raise MalformedArchive(f"{name}: the checksum in its footer is wrong", hint=_CUT_OFF)
    raise MalformedArchive(f"{name} is not a VHD image: no footer at its end begins with {COOKIE.decode()}", hint=_CUT_OFF)


def is_fixed(over: DiskReader) -> bool:
    """Whether the file is a disk and behind it the right footer of a fixed image: then its first bytes are a guest's."""
    at = over.size - FOOTER_BYTES
    content = bytes_of(over, at, FOOTER_BYTES) if at >= 0 else b""
    if not content.startswith(COOKIE) or not checksum_is_right(content, FOOTER_CHECKSUM_AT):
        return False
    try:
        footer = parse_footer(content, "the VHD image")
    except (MalformedArchive, UnsupportedFormat):
        return False
    return footer.kind is Kind.FIXED and footer.size == at


def parse_footer(content: bytes, name: str) -> Footer:
    """From its 512 bytes, whose checksum was compared."""
    _, _, version, header_at, _, creator, _, _, _, size, _, kind, _, identity, _ = _FOOTER.unpack_from(content)
    if version >> 16 != _VERSION_MAJOR:
        raise UnsupportedFormat(f"{name} is a VHD image of version {version >> 16}.{version & 0xFFFF}; version 1 is read")
    if kind not in (Kind.FIXED, Kind.DYNAMIC, Kind.DIFFERENCING):
        raise UnsupportedFormat(f"{name} is a VHD image of type {kind}; fixed, dynamic and differencing ones are read")
    if size % _SECTOR:
        raise MalformedArchive(f"{name}: a disk of {size} bytes, which are no whole sectors of {_SECTOR}")
    return Footer(Kind(kind), size, header_at, creator.decode("ascii", "replace").rstrip("\0 "), guid(identity))


def read_header(over: DiskReader, footer: Footer, name: str) -> Header:
    """The header of a dynamic or differencing image."""
    if footer.header_at > over.size - HEADER_BYTES:
        raise MalformedArchive(f"{name}: its header lies at {footer.header_at}, the file ends at {over.size}", hint=_CUT_OFF)
    content = bytes_of(over, footer.header_at, HEADER_BYTES)
    header, parent_name = parse_header(content, footer, name)
    if header.table_at > over.size - header.blocks * 4:
        raise MalformedArchive(
            f"{name}: a BAT of {header.blocks} blocks at {header.table_at}; the file ends at {over.size}", hint=_CUT_OFF
        )
    if footer.kind is not Kind.DIFFERENCING:
        return header
    return header._replace(parents=_parents(over, content, parent_name, name))


def parse_header(content: bytes, footer: Footer, name: str) -> tuple[Header, bytes]:
    """From its 1024 bytes; without the places of a parent, and the parent's name in UTF-16."""
    cookie, _, table_at, version, entries, block_bytes, _, parent, _, _, parent_name = _HEADER.unpack_from(content)
    if cookie != b"cxsparse" or not checksum_is_right(content, _HEADER_CHECKSUM_AT):
        raise MalformedArchive(f"{name}: its header at {footer.header_at} is damaged", hint=_CUT_OFF)
    if version >> 16 != _VERSION_MAJOR:
        raise UnsupportedFormat(f"{name} has a header of version {version >> 16}.{version & 0xFFFF}; version 1 is read")
    if not _SECTOR <= block_bytes <= _BLOCK_BYTES_MAX or block_bytes & (block_bytes - 1):
        raise MalformedArchive(f"{name}: blocks of {block_bytes} bytes; powers of two from {_SECTOR} can be")
    blocks = -(-footer.size // block_bytes)
    if blocks > entries:
        raise MalformedArchive(f"{name}: a BAT of {entries} blocks of {block_bytes} bytes cannot map {footer.size} bytes")
    header = Header(
        table_at=table_at,
        blocks=blocks,
        block_bytes=block_bytes,
        ends_at=max(
            footer.header_at + HEADER_BYTES, table_at + entries * 4, *(at + length for _, length, at in _locators(content))
        ),
        parent_identity=guid(parent),
        parents=(),
    )
    return header, parent_name


# Platform codes of parent locators: their encoding, and whether they are absolute. Windows keeps the specification's W2ru
# correct when files are moved; MacX is a URL, which Xen uses for relative names too.
_PLATFORMS: Final = ((b"W2ru", "utf-16-le", False), (b"MacX", "utf-8", False), (b"W2ku", "utf-16-le", True))


def _locators(header: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The header's parent locators: platform code, and how long and where the text is. Unused ones are all zeros."""
    for number in range(_LOCATORS):
        code, _, length, _, at = _LOCATOR.unpack_from(header, _LOCATORS_AT + number * _LOCATOR.size)
        yield code, length, at


def _parents(over: DiskReader, header: bytes, unicode_name: bytes, name: str) -> tuple[Reference, ...]:
    """Where the parent may be: its locators, the most likely first, and its bare name."""
    found: dict[bytes, bytes] = {}
    for code, length, at in _locators(header):
        if any(code == known for known, _, _ in _PLATFORMS) and length:
            if length > _LOCATOR_BYTES_MAX or at > over.size - length:
                raise MalformedArchive(f"{name}: a parent locator of {length} bytes at {at}; the file ends at {over.size}")
            found.setdefault(code, bytes_of(over, at, length))
    references = []
    for code, encoding, absolute in _PLATFORMS:
        if code in found:
            path = found[code].decode(encoding, "replace").rstrip("\0")
            references.append(_reference_of_url(path) if code == b"MacX" else Reference(path, absolute))
    bare = unicode_name.decode("utf-16-be", "replace").split("\0", 1)[0]
    if bare:
        references.append(Reference(bare, absolute=bool(references)))
    return tuple(references)


def _reference_of_url(url: str) -> Reference:
    """file://./name and ./name are relative, file://localhost/folder/name and file:///folder/name are absolute."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return Reference(url, absolute=True)
    if parts.netloc in ("", "localhost"):
        return Reference(unquote(parts.path), absolute=parts.path.startswith("/"))
    return Reference(unquote(parts.netloc + parts.path))


def checksum_is_right(content: bytes, at: int) -> bool:
    """The ones' complement of the sum of all bytes, without those of the checksum itself."""
    summed = sum(content) - sum(content[at : at + 4])
    return int.from_bytes(content[at : at + 4]) == ~summed & 0xFFFF_FFFF
