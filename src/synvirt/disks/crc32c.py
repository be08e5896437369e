"""CRC-32C (Castagnoli; RFC 3720, section 12.1): VHDX uses it for its headers, tables and log, Btrfs for its tree blocks.

zlib has the other CRC-32. Structures of 4 KiB to some MiB are checked once per image, so array arithmetic is fast enough (a
millisecond for 64 KiB) and saves a dependency: the data is cut into lanes that are processed together, byte by byte, and the
lanes' remainders are then joined in pairs. That works because a CRC is linear: the remainder of A followed by B is A's, moved
on by B's length, xor B's.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78  # reflected
_LANE_BYTES = 64


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """The CRC-32C of `data`, in RFC 3720's form (inverted at both ends)."""
    if len(data) < 4:
        return _bytewise(bytes(data))
    lanes = -(-len(data) // _LANE_BYTES)
    lanes = 1 << (lanes - 1).bit_length()
    # Leading zeros do not change a remainder of 0, so they may fill up the first lanes.
    padded = np.zeros(lanes * _LANE_BYTES, np.uint8)
    message = padded[len(padded) - len(data) :]
    message[:] = np.frombuffer(data, np.uint8)
    message[:4] ^= 0xFF
    remainders = _remainders(padded.reshape(lanes, _LANE_BYTES))
    step = _LANE_BYTES
    while len(remainders) > 1:
        remainders = _moved_on(remainders[0::2], step) ^ remainders[1::2]
        step *= 2
    return int(remainders[0]) ^ 0xFFFFFFFF


def _bytewise(data: bytes) -> int:
    remainder = 0xFFFFFFFF
    table = _table()
    for byte in data:
        remainder = int(table[(remainder ^ byte) & 0xFF]) ^ (remainder >> 8)
    return remainder ^ 0xFFFFFFFF


@cache
def _table() -> Words:
    """The remainder of each byte value."""
    words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        words = np.where(words & 1, (words >> 1) ^ np.uint32(_POLYNOMIAL), words >> 1).astype(np.uint32)
    return words


def _remainders(lanes: NDArray[np.uint8]) -> Words:
    table = _table()
    words = np.zeros(len(lanes), np.uint32)
    for column in np.ascontiguousarray(lanes.T):
        words = table[(words & 0xFF) ^ column] ^ (words >> 8)
    return words


def _moved_on(words: Words, count: int) -> Words:
    """Each remainder after `count` more zero bytes; `count` is a power of two."""
    result = np.zeros_like(words)
    for bit, image in enumerate(_images(count)):
        result ^= ((words >> np.uint32(bit)) & np.uint32(1)) * image
    return result


@cache
def _images(count: int) -> Words:
    """What `count` zero bytes make of each of the 32 bits."""
    words: Words = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if count == 1:
        moved: Words = _table()[words & 0xFF] ^ (words >> np.uint32(8))
        return moved
    return _moved_on(_moved_on(words, count // 2), count // 2)
