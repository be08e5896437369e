"""A gzip file (RFC 1952) as the bytes that were compressed, at any offset: `ovf:compression="gzip"`.

Their length is stored nowhere (the trailer has the size modulo 4 GiB, and several files may follow one another), and an image
has its tables anywhere. So opening it inflates it once to the end, and keeps the inflater's state at intervals. A read goes on
from the nearest state before it. The latest blocks are kept, since the threads of a copy read nearly in order.
"""

import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from synvirt.blocks import DiskReader, Extent, bytes_of
from synvirt.disks.passed import Pace
from synvirt.errors import DiskReadFailed, MalformedArchive

if TYPE_CHECKING:
    from zlib import _Decompress

# The unit that is inflated and kept: at most 48 MiB in all.
BLOCK_BYTES: Final = 1 << 20
_BLOCKS_KEPT: Final = 48
# A state takes about 44 KiB: 22 MiB in all. When there are too many, every second one is dropped.
_STATES_MAX: Final = 512
_STATES_APART_MIN: Final = 16 * BLOCK_BYTES
# The size of a read. Each state keeps the last such piece.
_COMPRESSED_BYTES: Final = 32 << 10
_GZIP_ONLY: Final = 16 + zlib.MAX_WBITS
# zlib inflates under a lock of its own here. More threads have to wait, but a copy with several works.
_READERS: Final = 4


@dataclass(slots=True)
class _State:
    """The inflater after `at` bytes of the content (whole blocks, except at the end); `taken` compressed bytes are read, and
    `left` of them not yet used."""

    at: int
    taken: int
    left: bytes
    inflater: "_Decompress"

    def copy(self) -> "_State":
        return _State(self.at, self.taken - len(self.left), b"", self.inflater.copy())


class GzippedReader:
    """The content of the gzip file `over`, which it owns. Content of more than `size_max_bytes` is refused as a bomb, and of
    less than `size_least_bytes` as incomplete: where gzip files follow one another, the last ones may be missing. `pace`: at
    which it is inflated when it is opened."""

    max_readers = _READERS

    def __init__(
        self, over: DiskReader, size_max_bytes: int, name: str, pace: Pace | None = None, *, size_least_bytes: int = 0
    ) -> None:
        self._over, self._name = over, name or "the gzip file"
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._states: list[_State] = []
        self.size = self._measured(size_max_bytes, pace)
        if self.size < size_least_bytes:
            raise MalformedArchive(
                f"{self._name} inflates to {self.size} bytes of {size_least_bytes}: the end of it is missing",
                hint="The export is incomplete: copy all of its files.",
            )
        # Where the last read ended; None: one has failed in the middle of a block.
        self._current: _State | None = None

    def _measured(self, size_max_bytes: int, pace: Pace | None) -> int:
        """Inflates all, and keeps a state at intervals."""
        state = _State(0, 0, b"", zlib.decompressobj(_GZIP_ONLY))
        apart = _STATES_APART_MIN
        while True:
            if not self._states or state.at - self._states[-1].at >= apart:
                self._states.append(state.copy())
                if len(self._states) > _STATES_MAX:
                    self._states, apart = self._states[::2], apart * 2
            if pace is not None:
                pace.take(BLOCK_BYTES)
            if not self._inflate(state, BLOCK_BYTES):
                return state.at
            if state.at > size_max_bytes:
                raise MalformedArchive(
                    f"{self._name} inflates to more than {size_max_bytes} bytes, larger than the disk in it can be"
                )

    def extents(self) -> Iterator[Extent]:
        return iter([Extent(0, self.size)] if self.size else [])

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{self._name}: {len(buffer)} bytes at offset {offset} are outside its {self.size}")
        at = 0
        while at < len(buffer):
            number, inner = divmod(offset + at, BLOCK_BYTES)
            with self._lock:
                block = self._block(number)
            part = memoryview(block)[inner : inner + len(buffer) - at]
            buffer[at : at + len(part)] = part
            at += len(part)

    def close(self) -> None:
        self._over.close()

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        start = number * BLOCK_BYTES
        nearest = self._states[bisect_right(self._states, start, key=lambda state: state.at) - 1]
        state, self._current = self._current, None
        if state is None or not nearest.at <= state.at <= start:
            state = nearest.copy()
        while True:
            at = state.at
            content = self._inflate(state, BLOCK_BYTES)
            if len(content) != min(BLOCK_BYTES, self.size - at):
                raise DiskReadFailed(f"{self._name} has changed since it was opened: {len(content)} bytes at offset {at}")
            self._keep(at // BLOCK_BYTES, content)
            if at == start:
                self._current = state
                return content

    def _keep(self, number: int, content: bytes) -> None:
        self._blocks[number] = content
        if len(self._blocks) > _BLOCKS_KEPT:
            self._blocks.popitem(last=False)

    def _inflate(self, state: _State, length: int) -> bytes:
        """Up to `length` bytes more; fewer only at the end."""
        pieces: list[bytes] = []
        wanted = length
        while wanted:
            if state.inflater.eof:  # gunzip joins several files in a row; zeros behind the last are padding
                rest = state.inflater.unused_data.lstrip(b"\0") or self._compressed(state).lstrip(b"\0")
                if not rest:
                    break
                state.inflater, state.left = zlib.decompressobj(_GZIP_ONLY), rest
            source = state.left or self._compressed(state)
            try:
                piece = state.inflater.decompress(source, wanted)
            except zlib.error as problem:
                raise MalformedArchive(f"{self._name} is damaged before byte {state.taken} of it: {problem}") from problem
            state.left = state.inflater.unconsumed_tail
            if not piece and not source and not state.inflater.eof:
                raise MalformedArchive(
                    f"{self._name} is cut short: it ends within compressed data, at byte {state.taken}",
                    hint="The file is incomplete: compare its size with the original and copy it again.",
                )
            pieces.append(piece)
            wanted -= len(piece)
            state.at += len(piece)
        return b"".join(pieces)

    def _compressed(self, state: _State) -> bytes:
        content = bytes_of(self._over, state.taken, min(_COMPRESSED_BYTES, self._over.size - state.taken))
        state.taken += len(content)
        return content
