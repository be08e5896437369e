"""A vSphere session that is closed while its snapshot is under way: nothing of it comes later."""

import asyncio
import contextlib

import pytest

from synvirt.errors import SourceUnreachable
from synvirt.live.vsphere import changes as vim_changes
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.session import VimSession
from tests.fakes.vcenter import VCenter
from tests.gates import PATIENCE_S, Gate

# The simulator is built by whoever comes first.
pytestmark = pytest.mark.timeout(600)

VM, NAME = "vm-57", "synvirt-a-1"


@pytest.mark.parametrize(("place", "step", "calls"), [(vim_changes, "_made", 0), (VimSession, "wait", 1)])
def test_a_snapshot_that_nobody_waits_for_is_not_made(
    platform: VCenter, monkeypatch: pytest.MonkeyPatch, place: object, step: str, calls: int
) -> None:
    """Before it is asked for it is not; after that the next session, which clears it away, waits for its task."""
    gate = Gate()
    monkeypatch.setattr(place, step, gate.before(getattr(place, step)))

    async def cancelled() -> None:
        adapter, another = VimApi(platform.access()), VimApi(platform.access())
        await adapter.connect()
        under_way = asyncio.create_task(adapter.snapshot(VM, NAME))
        assert await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
        under_way.cancel()
        await adapter.close()
        with contextlib.suppress(asyncio.CancelledError):
            await under_way
        await another.connect()
        await another.cleanup(VM, NAME)
        await another.close()
        assert platform.snapshots() == []
        gate.opened.set()  # and the loop ends once the call has

    asyncio.run(cancelled())
    assert platform.snapshots() == []
    assert platform.calls("CreateSnapshot_Task") == calls


def test_a_request_to_a_closed_session_is_refused(platform: VCenter) -> None:
    async def use() -> None:
        adapter = VimApi(platform.access())
        await adapter.connect()
        await adapter.close()
        await adapter.snapshot(VM, NAME)

    with pytest.raises(SourceUnreachable, match="closed"):
        asyncio.run(use())
    assert platform.calls("CreateSnapshot_Task") == 0
