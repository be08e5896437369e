"""Damaged qcow2 images: each is read or refused by name, in bounded time; what is read is what QEMU reads, if it does."""

import random
import subprocess
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from hypothesis import event, given
from hypothesis import strategies as st

from synvirt.disks.qcow2.reader import Qcow2Reader
from synvirt.disks.raw.files import RawReader
from synvirt.errors import SynvirtError
from tests.cases import cases
from tests.disks.block_images import bytes_of, qemu, scratch

KIB, MIB = 1 << 10, 1 << 20
# Reading stops here: a damaged size may be anything.
READ_BYTES_MAX = 16 * MIB
EXTENTS_MAX = 20_000

# Each has its tables and its data early in the file, so that damage meets them.
KINDS = {
    "version 2": "compat=0.10,cluster_size=4K",
    "version 3": "cluster_size=512",
    "extended L2": "extended_l2=on,cluster_size=16K",
    "zlib": "cluster_size=4K",
    "zstd": "compression_type=zstd,cluster_size=4K",
    "large clusters": "cluster_size=64K",
}


@cache
def sound_image(kind: str) -> bytes:
    with scratch() as folder:
        raw = folder / "raw"
        noise = random.Random(1).randbytes(20_000)
        raw.write_bytes(b"text" * 5000 + bytes(70_000) + noise + b"more" * 30_000 + bytes(300 * KIB))
        compress = ["-c"] if kind in ("zlib", "zstd") else []
        qemu("qemu-img", "convert", "-f", "raw", "-O", "qcow2", *compress, "-o", KINDS[kind], "raw", "image", cwd=folder)
        qemu("qemu-img", "bitmap", "--add", "-g", "4K", "image", "since", cwd=folder) if kind != "version 2" else None
        return (folder / "image").read_bytes()


@dataclass(frozen=True)
class Damage:
    """`length` bytes at an eighth-of-a-word boundary get a value: one that means something to the format, or any."""

    word: int
    value: bytes


EDGES = [0, 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
VALUES = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.sampled_from(EDGES).map(lambda number: number.to_bytes(8)),
    # Entries: places in and just outside the file, with and without flags.
    st.builds(
        lambda cluster, flags, low: ((flags << 62) | (cluster << 9) | low).to_bytes(8),
        st.integers(0, 1200), st.integers(0, 3), st.sampled_from([0, 0, 0, 1]),
    ),
)  # fmt: skip
# The header's words, most of all; and any word of the tables and what follows.
WORDS = st.one_of(st.integers(0, 40), st.integers(0, 400), st.integers(0, 60_000))
DAMAGES = st.lists(st.builds(Damage, WORDS, VALUES), min_size=1, max_size=4)


def damaged(kind: str, damages: list[Damage], length: float) -> bytes:
    content = bytearray(sound_image(kind))
    for damage in damages:
        at = damage.word * 8 % len(content)
        content[at : at + len(damage.value)] = damage.value
    # Now and then the file ends early.
    return bytes(content[: int(len(content) * min(1.0, length))])


def read_by_us(image: Path) -> bytes | None:
    """Everything that can be asked of the image, twice where it may be; None when it was refused."""
    over = RawReader(str(image))
    try:
        reader = Qcow2Reader(over, name="image")
        at = 0
        for extent in islice(reader.extents(), EXTENTS_MAX):
            assert extent.start == at
            at = extent.end
        assert at <= reader.size
        for bitmap in reader.bitmaps():
            list(islice(reader.dirty_extents(bitmap.name), EXTENTS_MAX))
        return bytes_of(reader, 0, min(reader.size, READ_BYTES_MAX))
    except SynvirtError:
        return None
    finally:
        over.close()


def read_by_qemu(image: Path) -> bytes | None:
    raw = image.with_name("raw")
    argv = ["qemu-img", "dd", "-f", "qcow2", "-O", "raw", f"bs={MIB}", f"count={READ_BYTES_MAX // MIB}", "if=image", "of=raw"]
    done = subprocess.run(argv, cwd=image.parent, capture_output=True, timeout=60)
    return raw.read_bytes() if done.returncode == 0 else None


@cases(250)
@given(kind=st.sampled_from(sorted(KINDS)), damages=DAMAGES, length=st.sampled_from([1.0] * 9 + [0.7, 0.3, 0.01]))
def test_a_damaged_image_is_read_as_qemu_reads_it_or_refused(kind: str, damages: list[Damage], length: float) -> None:
    with scratch() as folder:
        image = folder / "image"
        image.write_bytes(damaged(kind, damages, length))
        ours = read_by_us(image)
        if ours is not None:
            theirs = read_by_qemu(image)
            event("read by both" if theirs is not None else "read by us alone")
            # QEMU counts whole sectors of a size that is none.
            assert theirs is None or ours[: len(theirs)] == theirs
            assert theirs is None or len(ours) - len(theirs) < 512


@cases(300)
@given(content=st.binary(max_size=2048))
def test_garbage_is_refused(content: bytes) -> None:
    with scratch() as folder:
        image = folder / "image"
        image.write_bytes(content)
        assert read_by_us(image) is None
        image.write_bytes(b"QFI\xfb\0\0\0\3" + content)
        read_by_us(image)
