"""LZO1X blocks (Linux, Documentation/staging/lzo.rst), as in Btrfs: short ones, so plain Python is fast enough."""

from synvirt.disks.packed import Damaged

# A larger first byte begins with a run of literals; its length is the difference.
_FIRST_LITERALS = 17
# Base distances of the three longer kinds of matches.
_FAR, _NEAR_AFTER_LITERALS = 0x4000, 0x800
# The state after an instruction that was followed by a run of literals, whose length it does not contain.
_AFTER_RUN = 4


def decompress(stream: memoryview, into: memoryview) -> int:
    """Decompresses one block, and gives how many bytes of `into` it filled. What follows its end marker is ignored.

    A block with more content than `into`, or without its marker, is Damaged.
    """
    block = _Block(bytes(stream), into.nbytes)
    try:
        content = block.content()
    except IndexError:
        raise Damaged("it ends without its end marker") from None
    into[: len(content)] = content
    return len(content)


class _Block:
    def __init__(self, stream: bytes, most: int) -> None:
        self._stream, self._at, self._out, self._most = stream, 0, bytearray(), most

    def content(self) -> bytearray:
        state = self._beginning()
        while True:
            word = self._byte()
            if word < 16 and state == 0:
                self._literals(self._length(word, 15) + 3)
                state = _AFTER_RUN
                continue
            match = self._match(word, state)
            if match is None:
                return self._out
            distance, length, state = match
            self._repeat(distance, length)
            self._literals(state)

    def _beginning(self) -> int:
        """The state after the first byte: how many literals the last instruction had, or _AFTER_RUN."""
        if self._stream[0] <= _FIRST_LITERALS:
            return 0
        count = self._byte() - _FIRST_LITERALS
        self._literals(count)
        return min(count, _AFTER_RUN)

    def _match(self, word: int, state: int) -> tuple[int, int, int] | None:
        """The match's distance, its length, and how many literals follow it; None: the end marker."""
        if word >= 64:
            return 1 + (word >> 2 & 7) + (self._byte() << 3), (word >> 5) + 1, word & 3
        if word < 16:
            distance = 1 + (word >> 2) + (self._byte() << 2)
            return (distance + _NEAR_AFTER_LITERALS, 3, word & 3) if state == _AFTER_RUN else (distance, 2, word & 3)
        mask = 31 if word >= 32 else 7
        length = self._length(word & mask, mask) + 2
        last = self._byte() | self._byte() << 8
        if word >= 32:
            return 1 + (last >> 2), length, last & 3
        distance = ((word & 8) << 11) + (last >> 2)
        return (distance + _FAR, length, last & 3) if distance else None

    def _length(self, short: int, mask: int) -> int:
        """0 means that the length is in the bytes that follow, 255 for each zero byte."""
        if short:
            return short
        length = mask
        while not (last := self._byte()):
            length += 255
        return length + last

    def _byte(self) -> int:
        byte = self._stream[self._at]
        self._at += 1
        return byte

    def _literals(self, count: int) -> None:
        piece = self._stream[self._at : self._at + count]
        if len(piece) < count:
            raise IndexError
        self._at += count
        self._put(piece)

    def _repeat(self, distance: int, length: int) -> None:
        """A match may overlap its own output."""
        if distance > len(self._out):
            raise Damaged("it refers to bytes before its beginning")
        self._room(length)
        begin = len(self._out) - distance
        piece = self._out[begin : begin + length]
        self._put((piece * (length // len(piece) + 1))[:length])

    def _put(self, piece: bytes | bytearray) -> None:
        self._room(len(piece))
        self._out += piece

    def _room(self, length: int) -> None:
        if len(self._out) + length > self._most:
            raise Damaged(f"it holds over {self._most} bytes")
