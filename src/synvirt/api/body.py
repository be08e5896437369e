"""Reads a body that is too large for memory, as it comes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from synvirt.sizes import KIB, MIB, sized

# A thread handles this much at once: the event loop only collects.
PIECE_BYTES: Final = MIB
# Of a body that goes on, a caller sends this much in each `idle_s`, even over the slowest line: one that sends byte by byte
# would hold its connection and its place for years.
LEAST_BYTES: Final = 16 * KIB
TOO_LITTLE: Final = f"less than {sized(LEAST_BYTES)} came"


async def pieces(stream: AsyncIterator[bytes], idle_s: float) -> AsyncIterator[bytes]:
    """The body in pieces that are large enough for a thread. TimeoutError, if the caller neither ends it nor sends LEAST_BYTES
    of it within `idle_s` seconds; the time in which nobody asks for a piece does not count."""
    gathered, ended = bytearray(), False
    while not ended:
        enough = len(gathered) + LEAST_BYTES
        async with asyncio.timeout(idle_s):
            while len(gathered) < enough and not ended:
                chunk = await anext(stream, None)
                ended = chunk is None
                gathered += chunk or b""
        if len(gathered) >= PIECE_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)
