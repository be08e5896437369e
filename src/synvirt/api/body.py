"""Reads a body that is too large for memory, as it comes."""

import asyncio
from collections.abc import AsyncIterator

from synvirt.sizes import MIB

# A thread handles this much at once: the event loop only collects.
PIECE_BYTES = MIB


async def pieces(stream: AsyncIterator[bytes], idle_s: float) -> AsyncIterator[bytes]:
    """The body in pieces that are large enough for a thread. TimeoutError, if the caller sends nothing for this long."""
    gathered = bytearray()
    while True:
        async with asyncio.timeout(idle_s):
            chunk = await anext(stream, None)
        if chunk is None:
            break
        gathered += chunk
        if len(gathered) >= PIECE_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)
