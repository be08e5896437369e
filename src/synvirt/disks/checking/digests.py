"""The hashes of a ledger: a name, and a function that any number of threads may call at once.

Both release the interpreter's lock for a buffer of the copy's size.

- SHA-256 proves something to others, because nobody can make other bytes with the same hash. A ledger that is written or signed
  has it. It does 1.5 GB/s a thread.
- XXH3-128 only finds accidents: a flipped bit, a lost or misplaced write. One of 2^128 random differences escapes it, but
  somebody who wants to can make two blocks with the same hash. It is as fast as memory.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Digest:
    """A hash function: `of` gives the digest of a contiguous buffer, always of the same length; `name` as a ledger has it."""

    name: str
    of: Callable[[memoryview], bytes]


def _sha256(part: memoryview) -> bytes:
    return hashlib.sha256(part, usedforsecurity=False).digest()


SHA256: Final = Digest("sha256", _sha256)


def for_accidents() -> Digest:
    """XXH3-128, for a comparison within one process, of which no ledger is written."""
    import xxhash  # here, since only this needs it

    return Digest("xxh3-128", xxhash.xxh3_128_digest)
