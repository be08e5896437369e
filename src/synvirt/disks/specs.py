"""Readers and writers as data: what the engine stores, hands to a worker process, and opens again after a crash.

    {"format": "vmdk", "over": {"format": "raw", "path": "…/a.ova", "offset": 1536, "length": 73400320}}

An image lies over another reader, the bytes of its file, so any format may lie in any other: a VMDK in a tar member is a
VMDK over a range of a raw file. `open_reader` and `open_writer` in this package turn a spec into the thing.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from synvirt.model import Bytes, Received

# A VMDK in a gzip in a tar is 3 deep, a differencing chain is not nesting. 8 leaves room and stops a loop.
NESTING_MAX = 8


class RawSpec(Received):
    """A range of a file or block device, as it is. A tar member is one; `length` None means up to its end."""

    format: Literal["raw"] = "raw"
    path: str
    offset: Bytes = 0
    length: Bytes | None = None


class ImageSpec(Received):
    """A disk image over the bytes of its file.

    `root` is the folder that files named inside the image (backing files, extents, parents) must lie in; None refuses any.
    `name` is how errors call the image: a file or member name, never a host path. Where `root` is set it is the image's path
    beneath `root`, so that what the image names is looked for in the image's own folder.
    `parent` is what a differencing image lies over, where the image itself cannot say (VDI); no other format takes one.
    """

    format: Literal["vmdk", "qcow2", "vhdx", "vhd", "vdi"]
    over: "ReaderSpec"
    root: str | None = None
    name: str = ""
    parent: "ReaderSpec | None" = None


class NbdSpec(Received):
    """An NBD export. `bitmap` names a dirty-bitmap context (`qemu:dirty-bitmap:…`): extents are then the dirty ones only."""

    format: Literal["nbd"] = "nbd"
    uri: str
    bitmap: str | None = None
    connections: Annotated[int, Field(ge=1, le=64)] = 4


class QemuSpec(Received):
    """An image that only QEMU reads, in a file or a range of one. `driver` is QEMU's name of its format, never probed."""

    format: Literal["qemu"] = "qemu"
    driver: Literal["qcow2", "luks", "qcow", "qed", "bochs", "cloop", "dmg", "parallels", "vdi", "vhdx", "vpc"]
    path: str
    offset: Bytes = 0
    length: Bytes | None = None
    name: str = ""


class ChangedSpec(Received):
    """Some areas, (start, length) each, of another disk: a delta as a platform that tracks changes lists it."""

    format: Literal["changed"] = "changed"
    over: "ReaderSpec"
    areas: tuple[tuple[int, int], ...]


class XvaSpec(Received):
    """A disk in an XVA archive: the folder of its pieces, and the size that the archive's ova.xml gives."""

    format: Literal["xva"] = "xva"
    over: "ReaderSpec"
    folder: str
    size_bytes: Bytes
    name: str = ""


class JoinedSpec(Received):
    """Ranges of files, one after the other: a file that was cut into chunks."""

    format: Literal["joined"] = "joined"
    parts: tuple[RawSpec, ...]


class GzipSpec(Received):
    """What a gzip file holds; more than `size_max_bytes` of it are refused."""

    format: Literal["gzip"] = "gzip"
    over: "ReaderSpec"
    size_max_bytes: Bytes
    name: str = ""


class BlankSpec(Received):
    """A disk of zeros, which lies in no file."""

    format: Literal["blank"] = "blank"
    size_bytes: Bytes


AnyReaderSpec = RawSpec | ImageSpec | NbdSpec | QemuSpec | ChangedSpec | XvaSpec | JoinedSpec | GzipSpec | BlankSpec
ReaderSpec = Annotated[AnyReaderSpec, Field(discriminator="format")]


class FileWriterSpec(Received):
    """A sparse file of exactly `size_bytes`, already made by its destination."""

    kind: Literal["file"] = "file"
    path: str
    size_bytes: Bytes


class BlockWriterSpec(Received):
    """A block device (a zvol) of at least `size_bytes`: the disk's true size, which may be less than the device's."""

    kind: Literal["block"] = "block"
    path: str
    size_bytes: Bytes


WriterSpec = Annotated[FileWriterSpec | BlockWriterSpec, Field(discriminator="kind")]


class ChecksumSpec(Received):
    """A file range whose digest is checked in the same pass as the copy (an OVA's manifest line)."""

    path: str
    offset: Bytes = 0
    length: Bytes
    algorithm: Literal["sha1", "sha256", "sha512"]
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


READER_SPEC: TypeAdapter[AnyReaderSpec] = TypeAdapter(ReaderSpec)
WRITER_SPEC: TypeAdapter[FileWriterSpec | BlockWriterSpec] = TypeAdapter(WriterSpec)
