"""A body that is too large to hold, as it comes."""

import asyncio
from collections.abc import AsyncIterator

from synvirt.sizes import MIB

# A thread is asked once for so much: the event loop only gathers.
PIECE_BYTES = MIB


async def pieces(stream: AsyncIterator[bytes], idle_s: float) -> AsyncIterator[bytes]:
    """The body in pieces worth a thread's while. TimeoutError when the caller says nothing for so long."""
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
