"""The images that QEMU reads: encrypted ones, and obsolete formats (see `qemu`).

Our own readers refuse them. The first bytes alone decide here, so that the answer is the same in the plan, in the job, and
after a crash; a damaged image, or one that names files it may not have, is refused as always, and never given to QEMU. Only a
file of this host, or a range of one, can be given to QEMU: an image packed in something else stays refused.
"""

import os
import struct
from pathlib import Path
from typing import IO, Final

from synvirt.blocks import DiskReader, bytes_of
from synvirt.disks.formats import by_magic
from synvirt.disks.raw.files import RawReader
from synvirt.disks.specs import ImageSpec, QemuDriver, QemuSpec, RawSpec, ReaderSpec
from synvirt.errors import BadRequest, UnsupportedFormat
from synvirt.records import replace

# (QEMU's driver, the magic's place, the magic), as `by_magic` takes them.
MAGICS: Final[tuple[tuple[QemuDriver, int, bytes], ...]] = (
    ("qcow", 0, b"QFI\xfb\0\0\0\1"),
    ("qed", 0, b"QED\0"),
    ("parallels", 0, b"WithoutFreeSpace"),
    ("parallels", 0, b"WithouFreSpacExt"),
    ("bochs", 0, b"Bochs Virtual HD Image"),
    ("cloop", 0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop"),
    ("dmg", -512, b"koly"),
)
_LUKS: Final = b"LUKS\xba\xbe"
# In a qcow2 header, big-endian: magic, version; at 32 the encryption method, 0 for none.
_QCOW2: Final = struct.Struct(">4sI24xI")
_QCOW2_VERSIONS: Final = (2, 3)
# People type a passphrase; LUKS itself reads 512 bytes of one.
_KEY_BYTES_MAX: Final = 4096


def driver_of(reader: DiskReader) -> QemuDriver | None:
    """QEMU's name of the format of an image that only QEMU reads; None for all others. Only for files whose format may be
    detected (see `detect`)."""
    return by_magic(reader, MAGICS) or ("qcow2" if is_encrypted_qcow2(reader) else None)


def is_encrypted_qcow2(reader: DiskReader) -> bool:
    """Whether the image is a qcow2 image with an encryption method, by its header."""
    content = _bytes_at(reader, 0, _QCOW2.size)
    if len(content) < _QCOW2.size:
        return False
    magic, version, method = _QCOW2.unpack(content)
    return magic == b"QFI\xfb" and version in _QCOW2_VERSIONS and method != 0


def is_luks(reader: DiskReader) -> bool:
    """A disk that is one LUKS volume. Its bytes do not show whether it is an image of a disk or a guest's own encryption of a
    raw disk, so it is decrypted only where a key is given."""
    return _bytes_at(reader, 0, len(_LUKS)) == _LUKS


def readable(spec: ReaderSpec, *, key_file: str | None = None) -> ReaderSpec:
    """The spec itself, or QEMU's, where it is a qcow2 image that only QEMU reads (version 1, or encrypted)."""
    if (
        not isinstance(spec, ImageSpec)
        or spec.format != "qcow2"
        or not isinstance(spec.over, RawSpec)
        or spec.over.remote is not None
    ):
        return spec
    from synvirt.disks.roots import open_here

    raw = spec.over
    reader = open_here(raw.path, raw.offset, raw.length, raw.beneath)
    try:
        driver = driver_of(reader)
    finally:
        reader.close()
    if driver not in ("qcow2", "qcow"):
        return spec
    return qemu_spec(raw, driver, spec.name, key_file=key_file)


def qemu_spec(raw: RawSpec, driver: QemuDriver, name: str, *, key_file: str | None = None) -> QemuSpec:
    """The spec of a disk that qemu-nbd reads as `driver`. `key_file`: the path of the passphrase's file."""
    return QemuSpec(
        driver=driver,
        path=raw.path,
        offset=raw.offset,
        length=raw.length,
        name=name,
        key_file=key_file,
        beneath=raw.beneath,
    )


def with_key(spec: ReaderSpec, key_file: str | None, *, needed: bool = True) -> ReaderSpec:
    """The spec for a given key: an encrypted image with it; a raw disk that is a LUKS volume as the disk inside.

    `needed`: BadRequest, where the key can open nothing.
    """
    if key_file is None:
        return spec
    if isinstance(spec, QemuSpec) and spec.driver in ("qcow2", "qcow"):
        return replace(spec, key_file=key_file)
    if isinstance(spec, RawSpec):
        reader = RawReader(spec.path, spec.offset, spec.length)
        try:
            luks = is_luks(reader)
        finally:
            reader.close()
        if luks:
            return qemu_spec(spec, "luks", Path(spec.path).name, key_file=key_file)
    if needed:
        raise BadRequest("a key file is given, but the image is not encrypted")
    return spec


def passphrase(spec: QemuSpec) -> str | None:
    """The content of the key file, without its line end. UnsupportedFormat: it cannot be read."""
    if spec.key_file is None:
        return None
    name = Path(spec.key_file).name
    try:
        with _key_file(spec.key_file, spec.beneath) as file:
            content = file.read(_KEY_BYTES_MAX + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8, which passphrases of images are"
        raise UnsupportedFormat(f"the key file {name} cannot be read: {cause}") from error
    if not content or len(content) > _KEY_BYTES_MAX:
        raise UnsupportedFormat(f"the key file {name} is empty, or has more than {_KEY_BYTES_MAX} bytes")
    return text.removesuffix("\n").removesuffix("\r")


def _key_file(path: str, beneath: str | None) -> IO[bytes]:
    if beneath is None:
        return Path(path).open("rb")
    from synvirt.disks.roots import opened_beneath

    return os.fdopen(opened_beneath(beneath, path), "rb")


def _bytes_at(reader: DiskReader, at: int, length: int) -> bytes:
    """Fewer bytes, or none, where the disk ends before."""
    if at < 0 or at >= reader.size:
        return b""
    return bytes_of(reader, at, min(length, reader.size - at))
