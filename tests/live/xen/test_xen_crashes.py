"""The service dies at any moment: after every call that changes a pool. Nothing of ours stays on the pool, and tracking is as
it was found. Whole jobs of a killed service: test_xen_service.py.

A session of a service that was killed stays, until the pool ends it: its id died with the service. XenAPI knows no more.
"""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.live.xen.adapter import XenApi
from synvirt.live.xen.session import XenSession
from tests.contracts.live import in_session, read
from tests.fakes.xenserver import XenServer, xenserver
from tests.house import Crash

NAMES = [f"synvirt-a-{number}" for number in (1, 2, 3)]
TRANSPORTS = ["nbd", "export"]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[XenServer]:
    with xenserver(tmp_path / "pool") as running:
        yield running


class Calls:
    """Counts what is changed; after the call `last` the service is no more. What it asked for is done all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.last = 0, 0
        original = XenSession._ask

        def ask(session: XenSession, client: Any, method: str, *parameters: Any) -> Any:
            answer = original(session, client, method, *parameters)
            if ".get_" not in method and not method.startswith(("session.", "task.")):
                self.count += 1
                if self.count == self.last:
                    raise Crash
            return answer

        monkeypatch.setattr(XenSession, "_ask", ask)


def left(pool: XenServer) -> list[str]:
    """What a job may not leave at its source."""
    state = pool.pool
    tracked = [vdi["uuid"] for vdi in state.tables["VDI"].values() if vdi["cbt_enabled"] or vdi["other_config"]]
    domains = [vm["VBDs"] for vm in state.tables["VM"].values() if vm["is_control_domain"]]
    return [*state.snapshots(), *tracked, *(vbd for vbds in domains for vbd in vbds)]


async def life(adapter: XenApi, pool: XenServer, vm_id: str) -> None:
    """What the engine asks for in a warm job of one delta."""
    disk = (await adapter.inspect(vm_id)).disks[0]
    await adapter.enable_cbt(vm_id, [disk.key])
    since, before = None, None
    for name in NAMES:
        if name == NAMES[-1]:
            await adapter.shutdown(vm_id)
        made = await adapter.snapshot(vm_id, name)
        await asyncio.to_thread(read, await adapter.open_disk(vm_id, made, disk, since), bytes(disk.capacity_bytes))
        if before is not None:
            await adapter.cleanup(vm_id, before)
        await adapter.release(vm_id, name)
        since, before = made.change_ids[disk.key], name
        pool.pool.guest_writes(vm_id, 100, b"changed")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_service_that_dies_after_any_call_leaves_nothing(
    pool: XenServer, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """One that changes something: after any other it is as after the one before it."""
    calls, store, last = Calls(monkeypatch), pool.pool.add_store(), 0
    died = True

    def asked(use: Callable[[XenApi], Awaitable[Any]]) -> Any:
        return in_session(lambda: XenApi(pool.access(transport=transport)), use)

    while died:
        last += 1
        vm_id = pool.pool.add_vm(f"dies at {last}", [random.Random(1).randbytes(137 * 512)], store)

        async def lives(adapter: XenApi, vm_id: str = vm_id) -> None:
            await life(adapter, pool, vm_id)

        calls.count, calls.last = 0, last
        try:
            asked(lives)
            died = False
        except Crash:
            pass

        async def tidy(adapter: XenApi, vm_id: str = vm_id) -> None:
            for name in NAMES:  # all that were noted before they were made
                await adapter.cleanup(vm_id, name)

        calls.last = 0
        asked(tidy)
        assert left(pool) == [], last
    assert last > 12


def test_a_snapshot_that_comes_after_its_service_died_is_waited_for(pool: XenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool takes its time for one; killed meanwhile, the next service finds that one, and makes no other."""
    vm_id = pool.pool.add_vm("web", [bytes(1 << 20)], pool.pool.add_store())
    calls = Calls(monkeypatch)

    def asked(use: Callable[[XenApi], Awaitable[Any]]) -> Any:
        return in_session(lambda: XenApi(pool.access()), use)

    for then in (lambda adapter: adapter.snapshot(vm_id, NAMES[0]), lambda adapter: adapter.cleanup(vm_id, NAMES[0])):
        pool.pool.at_work.clear()
        calls.count, calls.last = 0, 1
        before = pool.pool.calls["VM.snapshot"]

        async def dies(adapter: XenApi) -> None:
            await adapter.snapshot(vm_id, NAMES[0])

        with pytest.raises(Crash):
            asked(dies)
        calls.last = 0
        ready = threading.Timer(0.3, pool.pool.at_work.set)
        ready.start()
        asked(then)
        ready.join()
        assert pool.pool.calls["VM.snapshot"] == before + 1
        asked(lambda adapter: adapter.cleanup(vm_id, NAMES[0]))
        assert left(pool) == []
