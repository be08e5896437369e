"""What a stream sends again, up to the watermark of an interrupted pass: it is read, and written nowhere.

`read_into()` of a stream would do it too, but within one call, which may take hours: nobody could cancel it, it would keep to
no limit of bandwidth, and its worker would look as if it had stalled.
"""

from collections.abc import Callable, Iterator

from synvirt.blocks import DiskReader, Extent
from synvirt.copying import Copied, copy


def pass_over(
    reader: DiskReader,
    until: int,
    *,
    bandwidth_bps: int | None = None,
    shared: Callable[[int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Copied], None] = lambda copied: None,
) -> None:
    """Reads the stream up to the offset `until`, in bytes. The arguments, and the errors, are those of `copy`."""
    copy(
        _Before(reader, until),
        Nowhere(reader.size),
        threads=1,
        bandwidth_bps=bandwidth_bps,
        shared=shared,
        stop=stop,
        on_progress=on_progress,
    )


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
