"""Raw bytes: reads a range of a file or block device; writes a sparse file or a block device.

A tar member is a range of the archive, so it needs no reader of its own. Holes are found by SEEK_DATA and SEEK_HOLE
(lseek(2)) and made by FALLOC_FL_PUNCH_HOLE (fallocate(2)), which both work on block devices too.

Errors name the file, never its path: all users of the job can see them.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from synvirt.blocks import Extent, Place
from synvirt.disks.raw.changes import opened
from synvirt.disks.raw.zvols import device_of
from synvirt.errors import DiskReadFailed, DiskWriteFailed, SynvirtError
from synvirt.sizes import MIB, WRITE_BYTES

if TYPE_CHECKING:
    from synvirt.disks.layers import Layer

# preadv and pwritev need no lock, so this is the most copy threads that there may be.
CALLS_AT_ONCE = 64
ZEROS: Final = bytes(MIB)
PAGE_BYTES = 4096

# linux/falloc.h, linux/fs.h: Python has no names for them.
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 0x01, 0x02
BLKDISCARD, BLKZEROOUT = 0x1277, 0x127F
# The errors of a file system or device for a call that it does not offer.
NOT_OFFERED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EINVAL})

HINTS = {
    errno.ENOSPC: "free space at the destination; if the job has failed, start it again then",
    errno.EDQUOT: "raise the quota at the destination; if the job has failed, start it again then",
    errno.EFBIG: "no file may be as large there: by its file system (FAT has 4 GiB), or by this process's limit (ulimit -f)",
    # Linux has no error of a device for EDQUOT: a zfs volume reports it so (include/os/linux/kernel/linux/blkdev_compat.h).
    errno.EIO: "the device reports an error: see the kernel's log, and its health; so does a zfs volume whose quota is used up",
    errno.EACCES: "the service's user needs permission for it",
    errno.EPERM: "the service's user needs permission for it",
    errno.EBUSY: "it is mounted or in use by another program",
    errno.EROFS: "its file system is read-only, perhaps since an error: see the kernel's log, and mount it for writing",
    errno.ESTALE: "the server of its file system does not know it any more: mount the file system again",
    errno.ENOTCONN: "what serves its file system has ended: mount the file system again",
    errno.ENOENT: "it was removed or renamed meanwhile",
}


class RawReader:
    """The bytes `offset … offset + length` of a file or block device; `length` None means up to its end.

    `descriptor`: of a file that is already open (by `open_beneath`), which the reader then owns; `path` is only its name.
    """

    max_readers = CALLS_AT_ONCE
    piece_bytes = WRITE_BYTES

    def __init__(self, path: str, offset: int = 0, length: int | None = None, *, descriptor: int | None = None) -> None:
        self._name = Path(path).name
        self._offset = offset
        self._fd = _open(path, os.O_RDONLY, DiskReadFailed) if descriptor is None else descriptor
        end = os.lseek(self._fd, 0, os.SEEK_END)
        self.size = max(end - offset, 0) if length is None else length
        if offset + self.size > end:
            self.close()
            raise DiskReadFailed(
                f"{self._name}: bytes {offset} to {offset + self.size} are needed, but it ends at {end}",
                hint="the file is cut off: copy it again from where it came",
            )
        opened(self)

    @property
    def name(self) -> str:
        """The file's name in errors."""
        return self._name

    @property
    def descriptor(self) -> int:
        """The file's descriptor, which the reader still owns."""
        return self._fd

    def extents(self) -> Iterator[Extent]:
        at, end = self._offset, self._offset + self.size
        while at < end:
            data = min(self._seek(at, os.SEEK_DATA, end), end)
            if data > at:
                yield Extent(at - self._offset, data - at, zero=True)
            if data < end:
                hole = min(self._seek(data, os.SEEK_HOLE, end), end)
                if hole > data:  # it may have become a hole since
                    yield Extent(data - self._offset, hole - data)
                data = hole
            at = data

    def _seek(self, at: int, whence: int, end: int) -> int:
        """The next data or hole at or after `at`; `end`, if there is none. Only this uses the file position."""
        try:
            return os.lseek(self._fd, at, whence)
        except OSError as error:
            if error.errno == errno.EINVAL:  # the file system does not know holes: all is data
                return at if whence == os.SEEK_DATA else end
            if error.errno == errno.ENXIO and os.lseek(self._fd, 0, os.SEEK_END) >= end:
                return end
            # ENXIO in a file that has shrunk meanwhile is no hole: missing data must not become zeros.
            self._failed(at, error)

    def places(self) -> Iterator[Place]:
        """All data lies unchanged in the file (see `disks.raw.cloning`)."""
        for extent in self.extents():
            if not extent.zero:
                yield Place(extent.start, extent.length, self._fd, self._offset + extent.start)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{self._name}: {len(buffer)} bytes at offset {offset} are outside its {self.size}")
        at = 0
        while at < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[at:] if at else buffer], self._offset + offset + at)
            except OSError as error:
                self._failed(self._offset + offset + at, error)
            if got == 0:
                self._failed(self._offset + offset + at, None)
            at += got

    def _failed(self, at: int, error: OSError | None) -> NoReturn:
        if error is None or error.errno == errno.ENXIO:
            raise DiskReadFailed(
                f"{self._name} ends before offset {at}, but was longer when it was opened",
                hint="nothing may write to it while it is read",
            ) from error
        number = error.errno or 0
        detail = f"{self._name} cannot be read at offset {at}: {os.strerror(number)}"
        raise DiskReadFailed(detail, hint=HINTS.get(number)) from error

    def layer(self) -> "Layer":
        from synvirt.disks.layers import Layer

        return Layer(name=self._name, format="raw", size_bytes=self.size)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# A way to make `length` bytes at `offset` of an open file read as zeros; OSError of NOT_OFFERED, where it is not available.
Zeroing = Callable[[int, int, int], None]


class RawWriter:
    """A file or block device; its first `size` bytes are the disk.

    `zeroings` are tried in turn, on ranges aligned to `alignment`; one that is not offered is not tried again. The unaligned
    edges, and everything when no way is offered, are written as zeros.
    """

    max_writers = CALLS_AT_ONCE
    piece_bytes = WRITE_BYTES

    def __init__(self, fd: int, name: str, size: int, *, zeroings: tuple[Zeroing, ...], alignment: int = 1) -> None:
        self.size = size
        self._fd, self._name = fd, name
        self._zeroings, self._alignment = zeroings, alignment

    @property
    def descriptor(self) -> int:
        return self._fd

    def write(self, offset: int, buffer: memoryview) -> None:
        self._check_range(offset, len(buffer))
        at = 0
        while at < len(buffer):
            try:
                at += os.pwrite(self._fd, buffer[at : at + WRITE_BYTES], offset + at)
            except OSError as error:
                self._failed(f"{len(buffer) - at} bytes", offset + at, error)

    def zero(self, offset: int, length: int) -> None:
        self._check_range(offset, length)
        start = min(-(-offset // self._alignment) * self._alignment, offset + length)
        end = max((offset + length) // self._alignment * self._alignment, start)
        self._write_zeros(offset, start - offset)
        self._zero_aligned(start, end - start)
        self._write_zeros(end, offset + length - end)

    def _zero_aligned(self, offset: int, length: int) -> None:
        for zeroing in self._zeroings if length else ():
            try:
                zeroing(self._fd, offset, length)
            except OSError as error:
                if error.errno not in NOT_OFFERED:
                    self._failed(f"{length} zeros", offset, error)
                self._zeroings = tuple(other for other in self._zeroings if other is not zeroing)
            else:
                return
        self._write_zeros(offset, length)

    def _write_zeros(self, offset: int, length: int) -> None:
        for at in range(offset, offset + length, len(ZEROS)):
            self.write(at, memoryview(ZEROS)[: offset + length - at])

    def _check_range(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise DiskWriteFailed(f"{self._name}: {length} bytes at offset {offset} are outside its {self.size}")

    def _failed(self, what: str, offset: int, error: OSError) -> NoReturn:
        number = error.errno or 0
        detail = f"{self._name}: {what} at offset {offset} cannot be written: {os.strerror(number)}"
        raise DiskWriteFailed(detail, hint=HINTS.get(number)) from error

    def flush(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            # The kernel reports a failed write-back once, without its place.
            self._failed("something written earlier, from the last watermark on or", 0, error)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_file_writer(path: str, size: int) -> RawWriter:
    """A sparse file of exactly `size` bytes, made by its destination."""
    name, fd = Path(path).name, _open(path, os.O_RDWR, DiskWriteFailed)
    _check_size(fd, name, size, exactly=True)
    return RawWriter(fd, name, size, zeroings=(punch_hole,))


def open_block_writer(path: str, size: int) -> RawWriter:
    """A block device of at least `size` bytes. O_EXCL: refused while it is mounted or another copy writes it."""
    name, fd = Path(path).name, _open(path, os.O_RDWR | os.O_EXCL, DiskWriteFailed)
    _check_size(fd, name, size, exactly=False)
    device = os.fstat(fd).st_rdev
    zeroings = (punch_hole, discard, zero_out) if _driver(os.major(device)) == "zvol" else (punch_hole, zero_out)
    return RawWriter(fd, name, size, zeroings=zeroings, alignment=_discard_granularity(device))


def _check_size(fd: int, name: str, size: int, *, exactly: bool) -> None:
    end = os.lseek(fd, 0, os.SEEK_END)
    if end < size or (exactly and end != size):
        os.close(fd)
        raise DiskWriteFailed(f"{name} has {end} bytes, the disk {size}")


@cache
def _fallocate() -> tuple[Callable[..., int], Callable[[], int]]:
    """The C library's function, and what gives its errno."""
    import ctypes  # takes a millisecond to load, and a new file needs no holes

    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call, ctypes.get_errno


def punch_hole(fd: int, offset: int, length: int) -> None:
    """fallocate(2): the kernel promises zeros, in files by a hole, on devices by write-zeroes that may unmap."""
    fallocate, get_errno = _fallocate()
    while fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length) != 0:
        number = get_errno()
        if number != errno.EINTR:  # ctypes, unlike os, does not repeat a call after a signal
            raise OSError(number, os.strerror(number))


def discard(fd: int, offset: int, length: int) -> None:
    """BLKDISCARD. Only zfs promises that discarded ranges read as zeros, and only for whole blocks of the volume."""
    fcntl.ioctl(fd, BLKDISCARD, struct.pack("=QQ", offset, length))


def zero_out(fd: int, offset: int, length: int) -> None:
    """BLKZEROOUT: the device itself writes zeros if it can, else the kernel."""
    fcntl.ioctl(fd, BLKZEROOUT, struct.pack("=QQ", offset, length))


def _driver(major: int) -> str:
    """The name of a block device's major number in /proc/devices."""
    _, _, blocks = Path("/proc/devices").read_text().partition("Block devices:")
    return dict(line.split(maxsplit=1) for line in blocks.splitlines() if line.strip()).get(str(major), "")


def _discard_granularity(device: int) -> int:
    """A zvol's block size: if an edge of a discarded range is not a whole block, its bytes stay."""
    queue = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/discard_granularity")
    with contextlib.suppress(OSError, ValueError):
        return max(int(queue.read_text()), PAGE_BYTES)
    return MIB  # a partition has no queue of its own: a multiple of any block size in use


def _open(path: str, flags: int, failure: type[SynvirtError]) -> int:
    """A descriptor of a regular file or block device. Others are never opened: a FIFO would wait, a tape rewind."""
    try:
        found = device_of(path)
        mode = Path(found).stat().st_mode
        fd = os.open(found, flags | os.O_CLOEXEC) if stat.S_ISREG(mode) or stat.S_ISBLK(mode) else -1
    except OSError as error:
        number = error.errno or 0
        raise failure(f"{Path(path).name} cannot be opened: {os.strerror(number)}", hint=HINTS.get(number)) from error
    if fd < 0:
        raise failure(f"{Path(path).name} is neither a file nor a block device")
    return fd
