"""The formats of disk images: how each is known by its magic, and what opens one. The table of openers is the package's, which
gives it to a reader whose image may lie over one of any format."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from synvirt.blocks import DiskReader, bytes_of
from synvirt.disks.specs import ImageFormat, ImageSpec

Name = TypeVar("Name", bound=str)
# Takes a reader of the image's file, which the new reader then owns and closes.
ImageOpener = Callable[[DiskReader, ImageSpec], DiskReader]
# By the name of the format.
ImageOpeners = Mapping[str, ImageOpener]

# First match wins: (format, the magic's place, the magic). VHD's is in the last 512 bytes (`-512`); dynamic ones have a copy at
# the front.
MAGICS: tuple[tuple[ImageFormat, int, bytes], ...] = (
    ("qcow2", 0, b"QFI\xfb"),
    ("vmdk", 0, b"KDMV"),
    ("vmdk", 0, b"COWD"),
    # seSparse: one extent; its reader refuses it as a disk. The number 0xCAFEBABE in 8 bytes, little-endian.
    ("vmdk", 0, b"\xbe\xba\xfe\xca\0\0\0\0"),
    # A text: VMware's first line, and those of other programs that write one (VirtualBox reads the same four).
    ("vmdk", 0, b"# Disk DescriptorFile"),
    ("vmdk", 0, b"# Disk Descriptor File"),
    ("vmdk", 0, b"#Disk DescriptorFile"),
    ("vmdk", 0, b"#Disk Descriptor File"),
    ("vhdx", 0, b"vhdxfile"),
    ("vdi", 0x40, b"\x7f\x10\xda\xbe"),
    ("vhd", 0, b"conectix"),
    ("vhd", -512, b"conectix"),
)
_FIXED = MAGICS[-1:]


def image_format(reader: DiskReader) -> ImageFormat | None:
    """The format by the magic of the bytes; None: no known one. See `detect` for when it can be trusted."""
    return "vhd" if is_fixed_vhd(reader) else by_magic(reader, MAGICS)


def is_fixed_vhd(reader: DiskReader) -> bool:
    """Whether it is a fixed VHD. It begins with its disk, so a guest may write the magic of any other format there."""
    if by_magic(reader, _FIXED) is None:
        return False
    from synvirt.disks.vhd import is_fixed  # most files have no such magic

    return is_fixed(reader)


def by_magic(reader: DiskReader, magics: Iterable[tuple[Name, int, bytes]]) -> Name | None:
    """The name whose magic the disk has, the first in a table of (name, place, magic). A place below zero counts
    from the end."""
    for name, at, magic in magics:
        start = at if at >= 0 else reader.size + at
        if 0 <= start <= reader.size - len(magic) and bytes_of(reader, start, len(magic)) == magic:
            return name
    return None
