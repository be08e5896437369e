"""LZO1X: each instruction of lzo.rst, written by a packer of this file, and anything at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.packed import Damaged, lzo
from tests.cases import cases

# A run of literals; or a match: its distance, its length, and up to three literals behind it.
Step = bytes | tuple[int, int, bytes]


def extended(length: int, mask: int) -> bytes:
    """A length that does not fit into its instruction."""
    left = length - mask - 1
    return bytes(left // 255) + bytes([left % 255 + 1])


class Packer:
    """What it packed, and what that holds. Steps that the last one does not allow are left out."""

    def __init__(self, first: bytes) -> None:
        self.packed, self.content, self._state = bytearray(), bytearray(first), 0
        if first:
            self.packed += bytes([17 + len(first)]) + first
            self._state = min(len(first), 4)

    def add(self, step: Step) -> None:
        if isinstance(step, bytes):
            if self._state == 0:
                short = len(step) - 3
                self.packed += (bytes([short]) if short <= 15 else b"\0" + extended(short, 15)) + step
                self.content += step
                self._state = 4
            return
        distance, length, literals = step
        words = self._match(distance, length, len(literals)) if 0 < distance <= len(self.content) else None
        if words is not None:
            self.packed += words + literals
            for _ in range(length):
                self.content.append(self.content[-distance])
            self.content += literals
            self._state = len(literals)

    def _match(self, distance: int, length: int, more: int) -> bytes | None:
        if length == 2 and 0 < self._state < 4:
            return bytes([(distance - 1 & 3) << 2 | more, distance - 1 >> 2]) if distance <= 1024 else None
        if length == 3 and self._state == 4 and 2048 < distance <= 3072:
            return bytes([(distance - 2049 & 3) << 2 | more, distance - 2049 >> 2])
        if length < 3:
            return None
        if length <= 8 and distance <= 2048:
            return bytes([length - 1 << 5 | (distance - 1 & 7) << 2 | more, distance - 1 >> 3])
        if distance <= 0x4000:
            return self._long(0x20, 31, length, (distance - 1) << 2 | more)
        far = distance - 0x4000
        return self._long(0x10 | far >> 11 & 8, 7, length, (far & 0x3FFF) << 2 | more) if 0 < far < 0x8000 else None

    @staticmethod
    def _long(word: int, mask: int, length: int, last: int) -> bytes:
        short = length - 2
        head = bytes([word | short]) if short <= mask else bytes([word]) + extended(short, mask)
        return head + last.to_bytes(2, "little")


runs = st.one_of(st.binary(min_size=4, max_size=40), st.integers(250, 1100).map(lambda count: b"synvirt! " * count))
distances = st.one_of(st.integers(1, 70), st.integers(1, 3072), st.integers(0x3FFE, 0x4002), st.integers(1, 0xBFFF))
lengths = st.one_of(st.integers(2, 9), st.integers(30, 36), st.integers(2, 2000))
steps = st.one_of(runs, st.tuples(distances, lengths, st.binary(max_size=3)))


@cases(300)
@given(first=st.binary(max_size=200), steps=st.lists(steps, max_size=30), behind=st.binary(max_size=5))
def test_what_was_packed_is_unpacked(first: bytes, steps: list[Step], behind: bytes) -> None:
    packer = Packer(first)
    for step in steps:
        packer.add(step)
    packed, content = bytes(packer.packed) + b"\x11\0\0", bytes(packer.content)
    into = bytearray(len(content) + 3)
    assert lzo.decompress(memoryview(packed + behind), memoryview(into)) == len(content)
    assert into == content + bytes(3)
    if content:
        with pytest.raises(Damaged):
            lzo.decompress(memoryview(packed), memoryview(bytearray(len(content) - 1)))
    with pytest.raises(Damaged):
        lzo.decompress(memoryview(packed[:-1]), memoryview(into))


@cases(500)
@given(packed=st.binary(max_size=300), most=st.integers(0, 5000))
def test_anything_else_is_damage(packed: bytes, most: int) -> None:
    into = bytearray(most)
    try:
        filled = lzo.decompress(memoryview(packed), memoryview(into))
    except Damaged:
        return
    assert filled <= most
