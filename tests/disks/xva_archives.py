"""XVA archives for the tests, as xapi writes them (`stream_vdi.ml`): zeros left out but for the first and the last piece, an
empty member now and then, a digest behind each piece."""

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import xxhash

from tests.needs import need

MIB = 1 << 20


def pieces(
    folder: str, disk: bytes, *, digest: str = "xxhash", keepalives: Collection[int] = ()
) -> Iterator[tuple[str, bytes]]:
    """Members in order. An empty one is put before each piece whose place on the disk is in `keepalives`."""
    number = 0
    count = -(-len(disk) // MIB)
    for place in range(count):
        if place in keepalives and 0 < place < count - 1:
            yield f"{folder}/{number:08d}", b""
            number += 1
        data = disk[place * MIB : (place + 1) * MIB]
        if any(data) or place in (0, count - 1):
            yield f"{folder}/{number:08d}", data
            if digest == "xxhash":
                yield f"{folder}/{number:08d}.xxhash", f"{xxhash.xxh64_intdigest(data):X}".encode()
            elif digest == "checksum":
                yield f"{folder}/{number:08d}.checksum", hashlib.sha1(data).hexdigest().encode()
        number += 1


def archive(path: Path, ova_xml: bytes, disks: Mapping[str, bytes], **options: object) -> Path:
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
