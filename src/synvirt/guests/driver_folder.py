"""The files of a virtio driver image, unpacked once for all conversions.

virt-v2v starts two more appliances in each conversion to read an image: most of the time that it takes. It reads a folder with
the same files itself.

    image ─▶ {data_dir}/drivers/IDENTITY        a shared lock: somebody reads it; an exclusive one: it is being removed

The identity changes with the image, and with each start of the host: so nothing must be flushed, and a power cut leaves nothing
that is used.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from synvirt.errors import Cancelled
from synvirt.guests.driver_image import Extent, Unreadable, extents

# Fedora's image has 700 MB. What a conversion itself needs beside it is in overlays.py.
BYTES_MAX = 4 << 30
PIECE_BYTES = 1 << 20
_UNPACKING, _REMOVING = ".unpacking-", ".removing-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def unpacked(image: Path, folder: Path, spare_bytes: int, stop: Callable[[], bool]) -> Iterator[Path]:
    """A folder with the image's files, until the block ends. `folder`: where such folders are kept; `spare_bytes`: what must
    stay free on its file system.

    Unreadable, where the image is no file of that kind or has no room; OSError; Cancelled, where `stop` says so meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(folder, fcntl.LOCK_EX):
        kept = folder / _identity(image)
        for other in folder.iterdir():
            if other != kept:
                _remove_unused(other)
        if not kept.exists():
            _unpack(image, kept, spare_bytes, stop)
        held = os.open(kept, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_SH)
    try:
        yield kept
    finally:
        os.close(held)


def _identity(image: Path) -> str:
    """Of the image as it is now, in this run of the host."""
    found = image.stat()
    parts = (image.resolve(), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, _BOOT_ID.read_text())
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _unpack(image: Path, kept: Path, spare_bytes: int, stop: Callable[[], bool]) -> None:
    """Whole, or not at all."""
    with image.open("rb") as file:
        found = list(extents(file))
        # Files of the same bytes have one extent: an image has most drivers twice, by two names.
        needed = sum({(one.at, one.length): one.length for one in found}.values())
        free = shutil.disk_usage(kept.parent).free
        if needed > BYTES_MAX or needed + spare_bytes > free:
            raise Unreadable(f"its files take {needed >> 20} MiB, and the data folder has {free >> 20} MiB free")
        new = Path(tempfile.mkdtemp(prefix=_UNPACKING, dir=kept.parent))
        try:
            _write(file.fileno(), found, new, stop)
            if _identity(image) == kept.name:
                new.rename(kept)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    if not kept.exists():
        raise Unreadable("it was changed while it was read")


def _write(image: int, found: list[Extent], folder: Path, stop: Callable[[], bool]) -> None:
    made: dict[tuple[int, int], Path] = {}
    for one in found:
        if stop():
            raise Cancelled
        target = folder / one.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (first := made.setdefault((one.at, one.length), target)) is target:
            _copy(image, one, target)
        else:
            target.hardlink_to(first)


def _copy(image: int, one: Extent, target: Path) -> None:
    with target.open("xb", buffering=0) as out:
        at, end = one.at, one.at + one.length
        while at < end:
            sent = os.sendfile(out.fileno(), image, at, min(PIECE_BYTES, end - at))
            if not sent:
                raise Unreadable(f"{one.path} lies behind its end")
            at += sent


def _remove_unused(folder: Path) -> None:
    """Of another image, or what a killed service left half. It is renamed first: half a folder must not be found by the name of
    its image, which may be used again."""
    with suppress(OSError), _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        going = folder.with_name(f"{_REMOVING}{folder.name.removeprefix(_REMOVING)}")
        folder.rename(going)
        shutil.rmtree(going, ignore_errors=True)


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """flock(2): it ends with its process."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, how)
        yield
    finally:
        os.close(held)
