"""Helpers of the tests of xen_api: a session with a pool, and contents of disks."""

import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from synvirt.live.xen.adapter import XenApi
from synvirt.model.machine import VmManifest
from tests.contracts.live import in_session
from tests.fakes.xenserver import XenServer

T = TypeVar("T")
CBT_BYTES, VHD_BYTES = 512 << 10, 2 << 20


def content(blocks: int, block_bytes: int) -> bytes:
    """Some blocks, a third of them zeros; the last one is not whole."""
    generator = random.Random(7)
    parts = (bytes(block_bytes) if number % 3 == 2 else generator.randbytes(block_bytes) for number in range(blocks))
    return b"".join(parts) + generator.randbytes(12 << 10)


def asked(pool: XenServer, use: Callable[[XenApi], Awaitable[T]], **options: Any) -> T:
    return in_session(lambda: XenApi(pool.access(**options)), use)


def concern_ids(vm: VmManifest) -> set[str]:
    return {concern.id for concern in vm.concerns}
