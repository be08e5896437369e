"""What is read only to come to the first byte that is wanted: what a stream sends again up to the watermark of an interrupted
pass, the disks before one in a packed archive, a gzip file that is inflated once to its end.

It may take hours. So it is read in steps at a Pace: it keeps to the limit of bandwidth, a cancel ends it, and it is reported,
as its worker would look as if it had stalled.
"""

from collections.abc import Callable, Iterator

from synvirt.blocks import DiskReader, Extent
from synvirt.copying import Bucket, copy
from synvirt.errors import Cancelled


class Pace:
    """What each step waits for. The arguments are those of `copy`, but `on_progress` gets the bytes that were read so far. For
    one thread at a time."""

    def __init__(
        self,
        *,
        bandwidth_bps: int | None = None,
        shared: Callable[[int], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[int], None] = lambda bytes_read: None,
    ) -> None:
        self.stop = stop
        self._bucket = Bucket(bandwidth_bps) if bandwidth_bps else None
        self._shared, self._on_progress = shared, on_progress
        self._taken = 0

    def take(self, amount: int) -> None:
        """Call it before so many bytes are read. Cancelled; what `shared` and `on_progress` raise."""
        if self.stop():
            raise Cancelled
        self._on_progress(self._taken)
        if self._bucket is not None:
            self._bucket.take(amount, self.stop)
        if self._shared is not None:
            self._shared(amount)
        self._taken += amount


def pass_over(reader: DiskReader, until: int, pace: Pace, *, since: int = 0) -> None:
    """Reads the stream from the offset `since`, where it is, up to `until`, in bytes. The errors are those of `copy`."""
    copy(_Before(reader, until), Nowhere(reader.size), since=since, threads=1, shared=pace.take, stop=pace.stop)


class _Before:
    """The disk as far as `until`."""

    max_readers = 1

    def __init__(self, inner: DiskReader, until: int) -> None:
        self._inner, self._until, self.size = inner, until, inner.size

    def extents(self) -> Iterator[Extent]:
        for extent in self._inner.extents():
            if extent.start >= self._until:
                return
            yield extent._replace(length=min(extent.end, self._until) - extent.start)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._inner.read_into(offset, buffer)

    def close(self) -> None:
        """The stream is read on: it is its owner's to close."""


class Nowhere:
    """A volume that takes all and keeps nothing."""

    max_writers = 64

    def __init__(self, size: int) -> None:
        self.size = size

    def write(self, offset: int, buffer: memoryview) -> None: ...
    def zero(self, offset: int, length: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
