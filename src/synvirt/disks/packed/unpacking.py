"""The content of gzip (RFC 1952) and zstd (RFC 8878) files, from front to back, in bounded memory.

    file ─▶ Unpacked.read ─▶ Passing.read_into ─▶ a walk over an archive that never goes back far

For random access to a gzip file see `gzipped`, which inflates it once before the first byte. Here reading begins at once, since
the content's length is not needed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Protocol, cast

from isal import igzip_lib

from synvirt.blocks import DiskReader, Extent, bytes_of
from synvirt.disks.packed import Damaged
from synvirt.disks.packed.zstd_stream import ZstdDecoder
from synvirt.disks.specs import Packing
from synvirt.errors import DiskReadFailed, MalformedArchive, UnsupportedFormat

CHUNK_BYTES: Final = 256 << 10
_SOURCE_BYTES: Final = 128 << 10
# Longer than any content; its real end shows when it is read.
_SIZE_BYTES: Final = 1 << 62
# isal's type stubs call its exception class an exception.
_ISAL_ERROR = cast(type[Exception], igzip_lib.error)

_GZIP_MAGIC, _ZSTD_MAGIC, _SKIPPABLE_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"


def packing_of(head: bytes) -> Packing | None:
    """By the file's magic. pzstd puts a skippable frame before the first one."""
    if head.startswith(_GZIP_MAGIC):
        return "gzip"
    skippable = head[1:4] == _SKIPPABLE_MAGIC and head[0] & 0xF0 == 0x50
    return "zstd" if head.startswith(_ZSTD_MAGIC) or skippable else None


class _Decoder(Protocol):
    """`hungry`: it has given all its output, and needs source; `between`: it is between frames or files."""

    @property
    def hungry(self) -> bool: ...
    @property
    def between(self) -> bool: ...
    def decode(self, source: bytes, length: int) -> bytes:
        """Up to `length` bytes more, perhaps none yet. `source` is empty unless it is hungry. Damaged."""
        ...


class _GzipDecoder:
    """gunzip joins several files to one content; zeros behind one are padding."""

    def __init__(self) -> None:
        self._inflater: igzip_lib.IgzipDecompressor | None = None
        self._rest = b""
        self.between = False

    @property
    def hungry(self) -> bool:
        return not self._rest and (self._inflater is None or self._inflater.needs_input)

    def decode(self, source: bytes, length: int) -> bytes:
        source, self._rest = self._rest or source, b""
        if self._inflater is None:
            source = source.lstrip(b"\0") if self.between else source
            if not source:
                return b""
            self._inflater, self.between = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP), False
        try:
            content = self._inflater.decompress(source, length)
        except _ISAL_ERROR as error:
            raise Damaged(str(error)) from error
        if self._inflater.eof:
            self._rest, self._inflater, self.between = self._inflater.unused_data.lstrip(b"\0"), None, True
        return content


_DECODERS: Mapping[Packing, Callable[[], _Decoder]] = MappingProxyType({"gzip": _GzipDecoder, "zstd": ZstdDecoder})


class Unpacked:
    """The content of the file `over`, in order. It does not own `over`. Not for several threads at once."""

    def __init__(self, over: DiskReader, packing: Packing, name: str) -> None:
        self._over, self._packing, self.name = over, packing, name
        self._decoder = _DECODERS[packing]()
        self._taken = 0

    def read(self, length: int) -> bytes:
        """The next `length` bytes; fewer only at the end. MalformedArchive, with the offset in the file."""
        pieces: list[bytes] = []
        wanted = length
        while wanted:
            source = self._source() if self._decoder.hungry else b""
            if not source and self._decoder.hungry:
                if self._decoder.between:
                    break
                raise MalformedArchive(
                    f"{self.name} is cut short: it ends within compressed data, at byte {self._taken}",
                    hint="The file is incomplete: compare its size with the original and copy it again.",
                )
            try:
                piece = self._decoder.decode(source, wanted)
            except Damaged as problem:
                raise MalformedArchive(
                    f"{self.name} is not {self._packing} data before byte {self._taken} of it: {problem}",
                    hint="The file is damaged: compare its checksum with the original and copy it again.",
                ) from problem
            wanted -= len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _source(self) -> bytes:
        source = bytes_of(self._over, self._taken, min(_SOURCE_BYTES, self._over.size - self._taken))
        self._taken += len(source)
        return source


class Passing:
    """The content as a disk that is read forwards: the last `kept_bytes` of it can be read again, and at most `most_bytes` are
    read. It owns `over`.

    Its length shows only at its end: `size` is more than that. A read that begins exactly at the end gives zeros, since there
    an archive looks for another member; a read behind it fails.
    """

    max_readers = 1
    size = _SIZE_BYTES

    def __init__(
        self, over: DiskReader, packing: Packing, name: str, *, kept_bytes: int, most_bytes: int = _SIZE_BYTES
    ) -> None:
        self.packing = packing
        self._over, self._content, self._name = over, Unpacked(over, packing, name), name
        self._kept_bytes, self._most_bytes = kept_bytes, most_bytes
        self._kept: deque[tuple[int, bytes]] = deque()
        self._end = 0
        self._ended = False

    def extents(self) -> Iterator[Extent]:
        return iter((Extent(0, self.size),))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        self._advance(end)
        if offset == self._end and self._ended:
            buffer[:] = bytes(len(buffer))
            return
        if end > self._end:
            raise MalformedArchive(
                f"{self._name} is cut short: it holds {self._end} bytes, and {len(buffer)} at offset {offset} are needed",
                hint="The file is incomplete: compare its size with the original and copy it again.",
            )
        if len(buffer) and (not self._kept or offset < self._kept[0][0]):
            raise DiskReadFailed(f"{self._name}: the bytes at offset {offset} have passed already")
        for start, content in reversed(self._kept):
            first, last = max(start, offset), min(start + len(content), end)
            if first < last:
                buffer[first - offset : last - offset] = memoryview(content)[first - start : last - start]
            if start <= offset:
                break

    def finish(self, most: int) -> None:
        """Reads on to the end, where the file's own checksums are. MalformedArchive: over `most` bytes follow."""
        self._advance(until := self._end + most + 1)
        if self._end >= until:
            raise MalformedArchive(f"{self._name}: over {most} bytes follow the end of the archive in it, at byte {self._end}")

    def close(self) -> None:
        self._over.close()

    def _advance(self, end: int) -> None:
        """Unpacks up to `end`, if there is as much."""
        while self._end < end and not self._ended:
            if self._end >= self._most_bytes:
                raise UnsupportedFormat(f"{self._name}: only the first {self._most_bytes} bytes that it holds are looked at")
            content = self._content.read(CHUNK_BYTES)
            self._ended = len(content) < CHUNK_BYTES
            self._kept.append((self._end, content))
            self._end += len(content)
            while self._end - self._kept[0][0] - len(self._kept[0][1]) >= self._kept_bytes:
                self._kept.popleft()
