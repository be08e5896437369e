"""synvirt disk info: the facts in a disk's image, and how much of it is data."""

from pathlib import Path
from typing import Any

from synvirt.blocks import DiskReader, coalesced
from synvirt.cli.disk.images import Found
from synvirt.cli.program import sheet
from synvirt.disks import open_reader
from synvirt.disks.layers import Layer, check_whole, layer_of
from synvirt.disks.nbd.fallback import is_encrypted_qcow2, is_luks
from synvirt.disks.raw.files import RawReader
from synvirt.disks.specs import ChangedSpec, GzipSpec, ImageSpec, QemuSpec, RawSpec, ReaderSpec, XvaSpec, format_name
from synvirt.disks.specs import paths as paths_of
from synvirt.sizes import sized


def described(found: Found) -> dict[str, Any]:
    """The description in the words of --json."""
    spec = found.reader
    head: dict[str, Any] = {"name": found.name, "format": format_name(spec), "over": _over(spec)}
    if isinstance(spec, QemuSpec):
        head["read_by"] = "qemu-nbd: our own readers do not read it"
        encrypted = _encrypted(spec)
        if encrypted and spec.key_file is None:
            return {**head, **encrypted, "locked": "--key-file FILE opens it", **_files(spec)}
        head |= encrypted
    reader = open_reader(spec)
    try:
        layer = layer_of(reader, found.name) or Layer(name=found.name, format=head["format"], size_bytes=reader.size)
        data_bytes, zero_bytes, extents = _summed(reader)
        check_whole(reader)
    finally:
        reader.close()
    return {
        **head,
        "size_bytes": layer.size_bytes,
        "data_bytes": data_bytes,
        "zero_bytes": zero_bytes,
        "extents": extents,
        **layer.facts,
        **_hints(spec),
        "chain": [{"name": each.name, "format": each.format, "size_bytes": each.size_bytes} for each in layer.chain()[1:]],
        **_files(spec),
        **{checksum.algorithm: checksum.expected for checksum in found.checksums},
    }


def lines_of(disk: dict[str, Any]) -> list[str]:
    """The description of a disk as lines for people."""
    return sheet((name, _text(name, value)) for name, value in disk.items())


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value} ({sized(value)})"
    if isinstance(value, list):
        return ", ".join(_text("", each) for each in value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{each}" if key in ("name", "format") else f"{key}={each}" for key, each in value.items())
    return "none" if value is None else str(value)


def _over(spec: ReaderSpec) -> list[str]:
    """The containers of the image, from the inside out: a VMDK in a gzip in a raw file."""
    found: list[str] = []
    while isinstance(spec, ImageSpec | ChangedSpec | XvaSpec | GzipSpec):
        spec = spec.over
        found.append(spec.format)
    return found


def _encrypted(spec: QemuSpec) -> dict[str, Any]:
    """The facts in the header of an encrypted image, without its key; nothing, if it is not encrypted."""
    from synvirt.disks.qcow2.header import read_header
    from synvirt.disks.qcow2.reader import facts_of

    reader = RawReader(spec.path, spec.offset, spec.length)
    try:
        if not is_encrypted_qcow2(reader):
            return {"encryption": "LUKS"} if spec.driver == "luks" else {}
        header = read_header(reader, spec.name, encrypted_too=True)
    finally:
        reader.close()
    return {"size_bytes": header.size, **facts_of(header)}


def _hints(spec: ReaderSpec) -> dict[str, Any]:
    if not isinstance(spec, RawSpec):
        return {}
    reader = RawReader(spec.path, spec.offset, spec.length)
    try:
        luks = is_luks(reader)
    finally:
        reader.close()
    return {"encryption": "a LUKS volume, copied as it is; --key-file FILE opens it"} if luks else {}


def _files(spec: ReaderSpec) -> dict[str, Any]:
    """The size of the named files, and how much space they use on this host."""
    key = getattr(spec, "key_file", None)
    found = [Path(path).stat() for path in {*paths_of(spec)} if path != key]
    return {
        "file_bytes": sum(status.st_size for status in found),
        "allocated_bytes": sum(status.st_blocks * 512 for status in found),
    }


def _summed(reader: DiskReader) -> tuple[int, int, int]:
    data_bytes = zero_bytes = extents = 0
    for extent in coalesced(reader.extents()):
        extents += 1
        data_bytes += 0 if extent.zero else extent.length
        zero_bytes += extent.length if extent.zero else 0
    return data_bytes, zero_bytes, extents
