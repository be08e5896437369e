"""A session that is closed while its snapshot is under way, on a real libvirtd: nothing of it comes later."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from uuid import uuid4

import pytest

from synvirt.live.libvirt import backup
from synvirt.live.libvirt import domain as domains
from synvirt.live.libvirt.adapter import LibvirtRemote
from tests.contracts.live import in_session
from tests.gates import PATIENCE_S, Gate
from tests.servers.libvirt_lab import LibvirtLab, lab


@pytest.fixture(scope="module")
def host() -> Iterator[LibvirtLab]:
    with lab() as running:
        yield running


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is under way would be waited for."""
    monkeypatch.setattr("synvirt.live.libvirt.adapter.CLOSE_WAIT_S", 0.0)


def given_up(host: LibvirtLab, gate: Gate, use: Callable[[LibvirtRemote], Coroutine[Any, Any, object]]) -> LibvirtRemote:
    """A session that is closed while its call stands at the gate."""

    async def cancelled() -> LibvirtRemote:
        adapter = LibvirtRemote(host.access("local"))
        await adapter.connect()
        under_way = asyncio.create_task(use(adapter))
        assert await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
        under_way.cancel()
        await adapter.close()
        with contextlib.suppress(asyncio.CancelledError):
            await under_way
        return adapter

    return asyncio.run(cancelled())


def clear_away(host: LibvirtLab, vm_id: str, name: str) -> None:
    in_session(lambda: LibvirtRemote(host.access("local")), lambda another: another.cleanup(vm_id, name))


def test_no_note_of_tracking_comes_later(host: LibvirtLab, monkeypatch: pytest.MonkeyPatch) -> None:
    domain = host.domain(host.disk("8M"))
    domain.create()
    vm_id, gate = domain.UUIDString(), Gate()
    monkeypatch.setattr(backup, "can_hold_checkpoint", gate.before(backup.can_hold_checkpoint))
    adapter = given_up(host, gate, lambda adapter: adapter.enable_cbt(vm_id, ["vda"]))
    clear_away(host, vm_id, f"synvirt-{uuid4()}-1")
    gate.opened.set()
    with adapter._lock:  # the call has ended
        assert "synvirt" not in domain.XMLDesc(0)
    assert host.snapshots(domain) == []


@pytest.mark.parametrize(("slow", "is_on", "begun"), [("freeze", True, 0), ("begin", True, 1), ("start", False, 0)])
def test_a_snapshot_that_nobody_waits_for_is_not_made(
    host: LibvirtLab, monkeypatch: pytest.MonkeyPatch, slow: str, is_on: bool, begun: int
) -> None:
    """What is cleared away by another session, as a cancelled job has it, is not there yet."""
    domain = host.domain(host.disk("8M"))
    domain.create()
    vm_id, name = domain.UUIDString(), f"synvirt-{uuid4()}-1"
    in_session(lambda: LibvirtRemote(host.access("local")), lambda adapter: adapter.enable_cbt(vm_id, ["vda"]))
    if not is_on:
        domain.destroy()
    gate, begins = Gate(), []

    def counted(*given: Any, **named: Any) -> None:
        begins.append(given)
        begin(*given, **named)

    @contextlib.contextmanager
    def freezing(*_: object) -> Iterator[None]:
        gate.wait()
        yield

    begin = gate.before(backup.begin) if slow == "begin" else backup.begin
    monkeypatch.setattr(backup, "begin", counted)
    if slow == "freeze":
        monkeypatch.setattr(LibvirtRemote, "_quiet", freezing)
    if slow == "start":
        monkeypatch.setattr(domains, "start_to_read", gate.before(domains.start_to_read))
    adapter = given_up(host, gate, lambda adapter: adapter.snapshot(vm_id, name))
    clear_away(host, vm_id, name)
    gate.opened.set()
    with adapter._lock:  # the call has ended
        assert len(begins) == begun
    assert host.snapshots(domain) == []
    assert bool(domain.isActive()) == is_on
    assert list((host.folder / "scratch").glob(f"{name}*")) == []
