"""What the tests of export leases share: sessions and jobs that read disks by a lease, against VMware's own simulator with the
lease that it lacks (tests/fakes/vcsim/leases.go).

What these tests prove: our calls, our reading of the stream, that a lease is kept alive and ended. What they cannot: how a real
host orders, compresses and paces its stream.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from synvirt.disks.specs import ReaderSpec
from synvirt.live import SourceAccess
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.lease import ExportLease
from tests.contracts.live import in_session
from tests.fakes.vcenter import VCenter
from tests.live.vsphere.test_vim_jobs import VM, VimHouse

T = TypeVar("T")


def by_lease(platform: VCenter) -> SourceAccess:
    return platform.access(fingerprint_sha256=platform.fingerprint, transport="lease")


def ask(access: SourceAccess, use: Callable[[VimApi], Awaitable[T]]) -> T:
    return in_session(lambda: VimApi(access), use)


async def opened(adapter: VimApi, name: str = "synvirt-a-1") -> ReaderSpec:
    snapshot = await adapter.snapshot(VM, name)
    one = (await adapter.inspect(VM)).disks[0]
    return await adapter.open_disk(VM, snapshot, one, None)


def forgotten(adapter: VimApi) -> ExportLease:
    """Its lease, which the adapter does not end."""
    disks = adapter._disks
    lease, disks._lease = disks._lease, None
    assert lease is not None
    assert lease._guard is not None
    lease._guard.leave()
    return lease


def way_of(access: SourceAccess) -> tuple[str, str | None, list[str]]:
    manifest = ask(access, lambda adapter: adapter.inspect(VM))
    return manifest.concerns[0].assessment, manifest.cbt_reason, [one.id for one in manifest.concerns]


class LeaseHouse(VimHouse):
    async def connect(self, kind: Any, source_id: Any) -> Any:
        return VimApi(by_lease(self.vcenter))
