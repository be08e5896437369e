"""Helpers of the tests with another libvirt host: sessions of the adapter, and the passes of one job."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from synvirt.live import LiveAdapter, SnapshotRef, SourceAccess
from synvirt.live.libvirt.adapter import libvirt_remote
from synvirt.model.machine import VmManifest
from tests.contracts.live import read
from tests.servers.libvirt_lab import LibvirtLab

T = TypeVar("T")


def ask(access: SourceAccess, use: Callable[[LiveAdapter], Awaitable[T]]) -> T:
    async def session() -> T:
        adapter = libvirt_remote(access)
        try:
            await adapter.connect()
            return await use(adapter)
        finally:
            await adapter.close()

    return asyncio.run(session())


def local(host: LibvirtLab, use: Callable[[LiveAdapter], Awaitable[T]], **options: Any) -> T:
    return ask(host.access("local", **options), use)


class OneJob:
    """The passes of a job that copies vda, by default alone, as the engine makes them."""

    def __init__(self, host: LibvirtLab, domain: Any, *, keys: Sequence[str] = ("vda",), **options: Any) -> None:
        self.keys = keys
        self.host, self.domain, self.vm_id, self.options = host, domain, domain.UUIDString(), options
        self.name = f"synvirt-{uuid4()}"
        self.refs: dict[int, SnapshotRef] = {}
        self.copy: bytes | None = None
        self.ask(lambda adapter: adapter.enable_cbt(self.vm_id, keys))

    def ask(self, use: Callable[[LiveAdapter], Awaitable[T]]) -> T:
        return local(self.host, use, **self.options)

    def begin(self, number: int) -> None:
        self.refs[number] = self.ask(lambda adapter: adapter.snapshot(self.vm_id, f"{self.name}-{number}", self.keys))

    def read(self, number: int, *, since: int | None) -> int:
        """How many bytes of data came."""

        async def use(adapter: LiveAdapter) -> int:
            disk = (await adapter.inspect(self.vm_id)).disks[0]
            change_id = None if since is None else self.refs[since].change_ids[disk.key]
            spec = await adapter.open_disk(self.vm_id, self.refs[number], disk, change_id)
            self.copy, data_bytes = await asyncio.to_thread(read, spec, None if since is None else self.copy)
            return data_bytes

        return self.ask(use)

    def pass_(self, number: int, *, since: int | None) -> int:
        self.begin(number)
        data_bytes = self.read(number, since=since)
        self.ask(lambda adapter: adapter.release(self.vm_id, f"{self.name}-{number}"))
        return data_bytes

    def clean(self) -> None:
        for number in range(1, 10):
            self.ask(lambda adapter: adapter.cleanup(self.vm_id, f"{self.name}-{number}"))  # noqa: B023
        assert self.host.snapshots(self.domain) == []
        assert list((self.host.folder / "scratch").glob(f"{self.name}*.scratch")) == []


def inspected(host: LibvirtLab, domain: Any) -> VmManifest:
    return local(host, lambda adapter: adapter.inspect(domain.UUIDString()))
