"""What the tests of vim_api share: one VM with one disk, and one session for each question."""

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from synvirt.disks.specs import DatastoreSpec, ReaderSpec
from synvirt.live import SourceAccess
from synvirt.live.vsphere.adapter import VimApi
from tests.contracts.live import in_session, read
from tests.drawn import shared_in_a_file
from tests.fakes.vcenter import DISK_BYTES

T = TypeVar("T")
BLOCK = 65536
VM = "vm-57"


@shared_in_a_file
def content(seed: int = 0, size: int = DISK_BYTES) -> bytes:
    """Data, with holes: every third MiB is zeros."""
    generator = random.Random(seed)
    return b"".join(bytes(1 << 20) if part % 3 == 2 else generator.randbytes(1 << 20) for part in range(size >> 20))


def ask(access: SourceAccess, use: Callable[[VimApi], Awaitable[T]]) -> T:
    return in_session(lambda: VimApi(access), use)


async def tracked(adapter: VimApi) -> None:
    await adapter.enable_cbt(VM, [disk.key for disk in (await adapter.inspect(VM)).disks])


def write(disk: Path, offset: int, data: bytes) -> None:
    with disk.open("r+b") as file:
        file.seek(offset)
        file.write(data)


async def opened(adapter: VimApi, name: str, since: str | None = None) -> tuple[ReaderSpec, str]:
    """Of the first disk: its reader, and its change id."""
    snapshot = await adapter.snapshot(VM, name)
    one = (await adapter.inspect(VM)).disks[0]
    return await adapter.open_disk(VM, snapshot, one, since), snapshot.change_ids.get(one.key, "")


def all_of(spec: DatastoreSpec) -> bytes:
    return read(spec)[0]
