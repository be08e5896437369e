"""How long a source takes to list its VMs: the row that every platform's bench has."""

import asyncio
import statistics
import time
from collections.abc import Callable

from synvirt.live import LiveAdapter

# For 2,000 VMs, a session and its end included.
REACH_S = 2.0


def took(adapter: Callable[[], LiveAdapter], vms: int, rounds: int) -> list[float]:
    """Seconds of each round that counts; one goes before them. `adapter` makes one that is not connected yet."""
    return [asyncio.run(_listed(adapter(), vms)) for _ in range(rounds + 1)][1:]


async def _listed(adapter: LiveAdapter, expected: int) -> float:
    began = time.monotonic()
    try:
        await adapter.connect()
        found = await adapter.list_vms()
    finally:
        await adapter.close()
    assert len(found) == expected
    return time.monotonic() - began


def row(name: str, seconds: list[float], reach: str, *, ok: bool) -> None:
    """| row | median | each | reach | ok |"""
    each = " ".join(f"{one:.2f}" for one in seconds)
    print(f"| {name} | {statistics.median(seconds):.2f} s | {each} | {reach} | {'yes' if ok else 'no'} |")


def listed_row(name: str, seconds: list[float]) -> None:
    row(name, seconds, f"< {REACH_S} s", ok=statistics.median(seconds) < REACH_S)
