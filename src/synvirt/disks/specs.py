"""Readers and writers as data: what the engine stores, hands to a worker process, and opens again after a crash.

    {"format": "vmdk", "over": {"format": "raw", "path": "…/a.ova", "offset": 1536, "length": 73400320}}

An image lies over another reader, the bytes of its file, so any format may lie in any other: a VMDK in a tar member is a
VMDK over a range of a raw file. `open_reader` and `open_writer` in this package turn a spec into the thing.

Plain data classes: a model of pydantic's may have one as a field, and `spec_json` reads and writes one by itself, yet a copy
on the command line need not wait for pydantic. Offsets and lengths are bytes.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

# A VMDK in a gzip in a tar is 3 deep, a differencing chain is not nesting. 8 leaves room and stops a loop.
NESTING_MAX = 8

ImageFormat = Literal["vmdk", "qcow2", "vhdx", "vhd", "vdi"]
QemuDriver = Literal["qcow2", "luks", "qcow", "qed", "bochs", "cloop", "dmg", "parallels", "vdi", "vhdx", "vpc"]
ChecksumAlgorithm = Literal["sha1", "sha256", "sha512"]


class Spec:
    """What all specs share: a field that is not known is an error, not silence."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSpec(Spec):
    """A range of a file or block device, as it is. A tar member is one; `length` None means up to its end."""

    format: Literal["raw"] = "raw"
    path: str
    offset: int = 0
    length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec(Spec):
    """A disk image over the bytes of its file.

    `root` is the folder that files named inside the image (backing files, extents, parents) must lie in; None refuses any.
    `name` is how errors call the image: a file or member name, never a host path. Where `root` is set it is the image's path
    beneath `root`, so that what the image names is looked for in the image's own folder.
    `parent` is what a differencing image lies over, where the image itself cannot say (VDI); no other format takes one.
    """

    format: ImageFormat
    over: "ReaderSpec"
    root: str | None = None
    name: str = ""
    parent: "ReaderSpec | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NbdSpec(Spec):
    """An NBD export. `bitmap` names a dirty-bitmap context (`qemu:dirty-bitmap:…`): extents are then the dirty ones only."""

    format: Literal["nbd"] = "nbd"
    uri: str
    bitmap: str | None = None
    connections: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuSpec(Spec):
    """An image that only QEMU reads, in a file or a range of one. `driver` is QEMU's name of its format, never probed."""

    format: Literal["qemu"] = "qemu"
    driver: QemuDriver
    path: str
    offset: int = 0
    length: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSpec(Spec):
    """Some areas, (start, length) each, of another disk: a delta as a platform that tracks changes lists it."""

    format: Literal["changed"] = "changed"
    over: "ReaderSpec"
    areas: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class XvaSpec(Spec):
    """A disk in an XVA archive: the folder of its pieces, and the size that the archive's ova.xml gives."""

    format: Literal["xva"] = "xva"
    over: "ReaderSpec"
    folder: str
    size_bytes: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSpec(Spec):
    """Ranges of files, one after the other: a file that was cut into chunks."""

    format: Literal["joined"] = "joined"
    parts: tuple[RawSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GzipSpec(Spec):
    """What a gzip file holds; more than `size_max_bytes` of it are refused."""

    format: Literal["gzip"] = "gzip"
    over: "ReaderSpec"
    size_max_bytes: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlankSpec(Spec):
    """A disk of zeros, which lies in no file."""

    format: Literal["blank"] = "blank"
    size_bytes: int


ReaderSpec = RawSpec | ImageSpec | NbdSpec | QemuSpec | ChangedSpec | XvaSpec | JoinedSpec | GzipSpec | BlankSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWriterSpec(Spec):
    """A sparse file of exactly `size_bytes`, already made by its destination."""

    kind: Literal["file"] = "file"
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWriterSpec(Spec):
    """A block device (a zvol) of at least `size_bytes`: the disk's true size, which may be less than the device's."""

    kind: Literal["block"] = "block"
    path: str
    size_bytes: int


WriterSpec = FileWriterSpec | BlockWriterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumSpec(Spec):
    """A file range whose digest is checked in the same pass as the copy (an OVA's manifest line)."""

    path: str
    offset: int = 0
    length: int
    algorithm: ChecksumAlgorithm
    expected: str
    name: str


def paths(spec: ReaderSpec) -> list[str]:
    """The files of this host that the spec itself names; what an image names inside is not among them."""
    match spec:
        case RawSpec():
            return [spec.path]
        case ImageSpec(parent=parent) if parent is not None:
            return paths(spec.over) + paths(parent)
        case ImageSpec() | ChangedSpec() | XvaSpec() | GzipSpec():
            return paths(spec.over)
        case JoinedSpec():
            return [part.path for part in spec.parts]
        case _:
            return []
