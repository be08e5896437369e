"""Appliances for the tests: disks by qemu-img, archives by tarfile, descriptions as each exporter writes them."""

import functools
import hashlib
import io
import random
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from synvirt import programs
from tests.drawn import shared_in_a_file
from tests.fakes.contents import Content, fill
from tests.needs import need

DESCRIPTIONS = Path(__file__).parent / "descriptions"
DISK_BYTES = 8 << 20


def description(name: str) -> bytes:
    return (DESCRIPTIONS / f"{name}.ovf").read_bytes()


@shared_in_a_file
def raw_disk(size: int = DISK_BYTES, seed: int = 1) -> bytes:
    """Some random runs in zeros, so that images are sparse and nothing can be mistaken for something else."""
    numbers = random.Random(seed)
    disk = bytearray(size)
    for _ in range(4):
        length = numbers.randrange(1, 200_000)
        start = numbers.randrange(0, size - length)
        disk[start : start + length] = numbers.randbytes(length)
    return bytes(disk)


def image(folder: Path, name: str, image_format: str, raw: Content, *options: str, compressed: bool = False) -> Path:
    """`folder/name`, an image of `raw` made by qemu-img. `options` are -o values."""
    need("qemu-img", "qemu-utils")
    source = folder / f".{name}.raw"
    source.parent.mkdir(parents=True, exist_ok=True)
    fill(source, raw)
    if image_format == "vpc":
        options = (*options, "force_size=on")  # or the size is rounded up to a geometry of cylinders
    extra = [*(["-o", ",".join(options)] if options else []), *(["-c"] if compressed else [])]
    target = folder / name
    programs.run(["qemu-img", "convert", "-f", "raw", "-O", image_format, *extra, str(source), str(target)], timeout_s=60)
    source.unlink()
    return target


def stream_vmdk(folder: Path, name: str, raw: bytes) -> Path:
    return image(folder, name, "vmdk", raw, "subformat=streamOptimized")


def manifest(files: Mapping[str, bytes], algorithm: str = "SHA256", line: str = "{algorithm}({name})= {digest}\n") -> bytes:
    return "".join(
        line.format(algorithm=algorithm, name=name, digest=hashlib.new(algorithm.lower(), data).hexdigest())
        for name, data in files.items()
    ).encode()


def archive(path: Path, files: Mapping[str, bytes], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar archive with `files` in that order."""
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def disk_file(kind: str, size: int, seed: int) -> bytes:
    """The image of a disk, made once for all tests; `stream` is streamOptimized."""
    return zlib.decompress(_packed_file(kind, size, seed))


@functools.cache
def _packed_file(kind: str, size: int, seed: int) -> bytes:
    """Some of them are zeros all but for a fortieth: 16 MiB of a worker's memory, as long as it runs."""
    with tempfile.TemporaryDirectory() as name:
        folder, raw = Path(name), raw_disk(size, seed)
        made = stream_vmdk(folder, "disk", raw) if kind == "stream" else image(folder, "disk", kind, raw)
        return zlib.compress(made.read_bytes(), 1)


def appliance(ovf: str = "ovftool") -> dict[str, bytes]:
    """The files of an appliance with the description `ovf`: in ovftool's order, with a SHA-256 manifest."""
    disks = {
        name: disk_file(kind, DISK_BYTES * 2 if name == "disk2.vmdk" else DISK_BYTES, seed)
        for seed, (name, kind) in enumerate(DISKS[ovf].items())
    }
    others = {"winsrv-file1.nvram": b"nvram" * 100} if ovf == "ovftool" else {}
    files = {f"{ovf}.ovf": description(ovf), **disks, **others}
    return {**files, f"{ovf}.mf": manifest(files)}


DISKS: dict[str, dict[str, str]] = {
    "ovftool": {"disk1.vmdk": "stream", "disk2.vmdk": "stream"},
    "virtualbox": {"disk1.vmdk": "stream"},
    "xenserver": {"disk1.vhd": "vpc"},
    "ovirt": {"8e5b5eb2-8a3a-4c9e-91a4-6de1b2c8fa4e": "qcow2"},
    "aws": {"disk1.vmdk": "stream"},
    "vmware_0_9": {"disk1.vmdk": "vmdk"},
    "ovf_2": {"disk1.vmdk": "stream"},
    "qemu_user": {"disk1.qcow2": "qcow2"},
    "vcloud": {"disk1.vmdk": "stream"},
}


def folder(path: Path, files: Mapping[str, bytes]) -> Path:
    """A folder with `files`."""
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path
