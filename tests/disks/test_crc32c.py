"""CRC-32C against its published check values, and against the definition, bit by bit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.crc32c import crc32c
from tests.cases import cases


def by_definition(data: bytes) -> int:
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


# RFC 3720, section B.4.
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@cases(200)
@given(st.binary(max_size=5000))
def test_any_length_is_as_defined(data: bytes) -> None:
    assert crc32c(data) == by_definition(data)
