"""wmi_api and the end of a guest: who is asked, who is not powered off, and what is known of a guest that is off."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from synvirt.errors import Conflict, SourceUnreachable
from synvirt.live.hyperv import power
from synvirt.live.hyperv.adapter import WmiApi
from tests.contracts.live import in_session, read
from tests.fakes.hyperv.host import FakeHost
from tests.fakes.hyperv.model import OFF, RUNNING, SAVED, FakeVm
from tests.fakes.hyperv.wsman import Refusal

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "POLL_S", 0.01)


@pytest.fixture
def vm(hyperv: FakeHost) -> FakeVm:
    return hyperv.hyperv.add_vm(f"vm-{uuid4().hex[:8]}", random.Random(1).randbytes(SIZE))


def ask(host: FakeHost, use: Callable[[WmiApi], Awaitable[Any]]) -> Any:
    return in_session(lambda: WmiApi(host.access()), use)


def test_a_shutdown_that_was_cancelled_powers_nothing_off(
    hyperv: FakeHost, vm: FakeVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread goes on, and would power the guest off at its deadline, when the job has powered it on again."""
    wished: list[str] = []

    def heard(_node: str, vm_id: str, wish: str) -> Any:
        wished.append(wish)
        if wish == "off":
            vm.state = OFF
        return {"heard": True}

    async def use() -> None:
        adapter = WmiApi(hyperv.access())
        await adapter.connect()
        asking = asyncio.create_task(adapter.shutdown(vm.id, timeout_s=1))
        while not wished:
            await asyncio.sleep(0.01)
        asking.cancel()
        await adapter.close()

    monkeypatch.setattr(hyperv.hyperv, "_power", heard, raising=False)
    asyncio.run(use())  # waits for its threads
    assert (wished, vm.state) == (["shutdown"], RUNNING)
    assert hyperv.wsman.shells == {}


def test_a_vm_that_is_busy_is_not_powered_off(hyperv: FakeHost, vm: FakeVm) -> None:
    """The guest could be asked a little later."""
    hyperv.hyperv.refuse("power", Refusal("InitiateShutdown", 32774), Wish="shutdown")
    with pytest.raises(SourceUnreachable, match="busy"):
        ask(hyperv, lambda adapter: adapter.shutdown(vm.id))
    assert vm.state == RUNNING
    ask(hyperv, lambda adapter: adapter.shutdown(vm.id))
    assert vm.state == OFF


def test_what_changed_since_a_snapshot_that_could_not_be_released_is_known_of_a_guest_that_is_off(
    hyperv: FakeHost, vm: FakeVm
) -> None:
    """Its host was away after the pass. The last pass would compare whole disks, and the guest is off meanwhile."""
    job = uuid4()
    first, last = f"synvirt-{job}-1", f"synvirt-{job}-2"

    async def use(adapter: WmiApi) -> None:
        disk = (await adapter.inspect(vm.id)).disks[0]
        before = await adapter.snapshot(vm.id, first)
        copy, _ = await asyncio.to_thread(read, await adapter.open_disk(vm.id, before, disk, None))
        hyperv.hyperv.guest_writes(vm, 4096, b"the last words")
        await adapter.shutdown(vm.id)
        after = await adapter.snapshot(vm.id, last)
        spec = await adapter.open_disk(vm.id, after, disk, before.change_ids[disk.key])
        found, data_bytes = await asyncio.to_thread(read, spec, copy)
        assert found == hyperv.hyperv.content(vm)
        assert 0 < data_bytes < SIZE // 4
        for name in (first, last):
            await adapter.cleanup(vm.id, name)

    ask(hyperv, use)
    assert hyperv.snapshots(vm) == []


def test_a_guest_that_is_saved_while_it_is_asked_loses_nothing(
    hyperv: FakeHost, vm: FakeVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was restarted, which saves its VMs: to switch it off would throw its memory away."""

    def saved(_node: str, vm_id: str, wish: str) -> Any:
        assert wish == "shutdown"
        vm.state = SAVED
        return {"heard": True}

    monkeypatch.setattr(hyperv.hyperv, "_power", saved, raising=False)
    for _ in range(2):  # the second time it is saved already
        with pytest.raises(Conflict, match="is suspended"):
            ask(hyperv, lambda adapter: adapter.shutdown(vm.id, timeout_s=0.05))
    assert vm.state == SAVED
