"""XVA archives for the tests, as xapi writes them (`stream_vdi.ml`): zeros left out but for the first and the last piece, an
empty member now and then, a digest behind each piece."""

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import xxhash

from tests.fakes.contents import Content, size_of
from tests.needs import need

MIB = 1 << 20


def pieces(
    folder: str, disk: Content, *, digest: str = "xxhash", keepalives: Collection[int] = ()
) -> Iterator[tuple[str, bytes]]:
    """Members in order. An empty one is put before each piece whose place on the disk is in `keepalives`."""
    number = 0
    for place, (data, is_last) in enumerate(_mebibytes(disk)):
        if place in keepalives and place > 0 and not is_last:
            yield f"{folder}/{number:08d}", b""
            number += 1
        if data != bytes(len(data)) or place == 0 or is_last:
            yield f"{folder}/{number:08d}", data
            if digest == "xxhash":
                yield f"{folder}/{number:08d}.xxhash", f"{xxhash.xxh64_intdigest(data):X}".encode()
            elif digest == "checksum":
                yield f"{folder}/{number:08d}.checksum", hashlib.sha1(data).hexdigest().encode()
        number += 1


def _mebibytes(disk: Content) -> Iterator[tuple[bytes, bool]]:
    """One after the other, and whether it is the last one."""
    size = size_of(disk)
    with disk.open("rb") if isinstance(disk, Path) else io.BytesIO(disk) as file:
        for at in range(0, size, MIB):
            yield file.read(MIB), at + MIB >= size


def archive(path: Path, ova_xml: bytes, disks: Mapping[str, Content], **options: object) -> Path:
    """xapi writes ustar headers with a size in octal, ova.xml first, and the disks one after the other."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        _add(tar, "ova.xml", ova_xml)
        for folder, disk in disks.items():
            for name, data in pieces(folder, disk, **options):  # type: ignore[arg-type]
                _add(tar, name, data)
    return path


def packed(path: Path, packing: str, *options: str) -> Path:
    """The archive as the gzip or zstd program packs it, beside it and under its own name and one suffix more."""
    program, suffix = {"gzip": (need("gzip", "gzip"), ".gz"), "zstd": (need("zstd", "zstd"), ".zst")}[packing]
    target = path.with_name(path.name + suffix)
    with path.open("rb") as source, target.open("wb") as into:
        subprocess.run([program, "-c", *options], stdin=source, stdout=into, check=True, timeout=60)
    return target


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
