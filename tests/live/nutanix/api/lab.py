"""What the tests of prism_api share, against a Prism of ours that is held to the vendor's schema, and the real servers of its
bytes.

What these tests prove: the order of calls, the shapes, the bytes. What they cannot: a real cluster's timing, and its own
tracking.
"""

import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from synvirt.live import SourceAccess
from synvirt.live.nutanix.adapter import PrismApi
from tests.contracts.live import in_session
from tests.fakes.prism.server import Prisms
from tests.fakes.prism.state import VmState

T = TypeVar("T")
SIZE = 4 << 20


def content(seed: int = 0, size: int = SIZE) -> bytes:
    """Data, with holes: every third 256 KiB is zeros."""
    generator = random.Random(seed)
    return b"".join(bytes(1 << 18) if part % 3 == 2 else generator.randbytes(1 << 18) for part in range(size >> 18))


def ask(access: SourceAccess, use: Callable[[PrismApi], Awaitable[T]]) -> T:
    return in_session(lambda: PrismApi(access), use)


def machine(prisms: Prisms, **fields: Any) -> VmState:
    return prisms.state.add_vm("web", {"scsi.0": content(), "sata.1": content(1, 1 << 20)}, **fields)


async def opened(adapter: PrismApi, vm_id: str, name: str = "synvirt-a-1", since: str | None = None) -> Any:
    """Of the first disk: its reader's spec."""
    snapshot = await adapter.snapshot(vm_id, name)
    return await adapter.open_disk(vm_id, snapshot, (await adapter.inspect(vm_id)).disks[0], since)
