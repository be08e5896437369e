"""When a VM was started last, by vSphere's events."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from synvirt.errors import Conflict, Internal, SourceUnreachable
from synvirt.live import GuestStaysOn
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.power import NOT_KNOWN, mark, power_on
from synvirt.live.vsphere.session import library
from tests.contracts.live import in_session
from tests.fakes.vcenter import VCenter

# The simulator is built by whoever comes first.
pytestmark = pytest.mark.timeout(600)

VM = "vm-57"


def last_start(platform: VCenter, vm_id: str) -> str:
    return in_session(lambda: VimApi(platform.access()), lambda adapter: adapter.last_start(vm_id))


def restart(platform: VCenter, vm_id: str) -> None:
    async def use(adapter: VimApi) -> None:
        await adapter.shutdown(vm_id)
        await adapter.power_on(vm_id)
        await adapter.shutdown(vm_id)

    in_session(lambda: VimApi(platform.access()), use)


def test_the_start_of_another_vm_is_not_reported(platform: VCenter) -> None:
    rows = in_session(lambda: VimApi(platform.access()), lambda adapter: adapter.list_vms())
    other = next(row.vm_id for row in rows if row.vm_id != VM)
    before = {vm_id: last_start(platform, vm_id) for vm_id in (VM, other)}
    restart(platform, other)
    assert last_start(platform, VM) == before[VM]
    assert last_start(platform, other) != before[other]


def test_of_many_starts_the_last_one_counts(platform: VCenter) -> None:
    """More than fit into a usual page of events."""
    seen = []
    for _ in range(12):
        restart(platform, VM)
        seen.append(last_start(platform, VM))
    assert len(set(seen)) == len(seen)
    assert platform.calls("DestroyCollector") == platform.calls("CreateCollectorForEvents") == len(seen)


@pytest.mark.parametrize("kind", ["NoPermission", "NotSupported"])
def test_a_platform_that_does_not_tell_hinders_nobody(platform: VCenter, kind: str) -> None:
    platform.fault("CreateCollectorForEvents", kind, times=2)
    with structlog.testing.capture_logs() as reported:
        assert [last_start(platform, VM) for _ in range(2)] == [NOT_KNOWN, NOT_KNOWN]
    assert [one["vm"] for one in reported if one["log_level"] == "warning"] == [VM, VM]
    assert last_start(platform, VM) != NOT_KNOWN


@pytest.mark.parametrize("hears", [True, False])
def test_a_guest_that_is_held_is_asked_and_not_powered_off(platform: VCenter, hears: bool) -> None:
    """Its tools do not answer, or it is busy with its updates: `ShutdownGuest` is answered and nothing comes of it."""
    platform.fault("ShutdownGuest", "ignored" if hears else "ToolsUnavailable", times=2)

    async def use(adapter: VimApi) -> None:
        # The deadline of the job's plan goes before that of its source.
        for given_s, waited in ((None, "after 1 s"), (0.0, "after 0 s")):
            with pytest.raises(GuestStaysOn, match=f"still runs {waited}"):
                await adapter.shutdown(VM, "hold", given_s)
        assert (await adapter.inspect(VM)).power_state == "on"
        await adapter.shutdown(VM, "force")
        assert (await adapter.inspect(VM)).power_state == "off"
        await adapter.shutdown(VM, "hold")  # it is off: all is done

    access = platform.access(fingerprint_sha256=platform.fingerprint, shutdown_timeout_s=1)
    in_session(lambda: VimApi(access), use)
    assert platform.calls("PowerOffVM_Task") == 1


def test_a_session_that_is_lost_in_between_is_made_again(platform: VCenter) -> None:
    before = last_start(platform, VM)
    platform.fault("CreateCollectorForEvents", "NotAuthenticated")
    assert last_start(platform, VM) == before


def test_a_guest_that_is_suspended_while_it_is_asked_loses_nothing(platform: VCenter) -> None:
    platform.fault("ShutdownGuest", "ignored")

    async def use(adapter: VimApi) -> None:
        session = adapter._session
        task = await asyncio.to_thread(session.call, "suspend it", lambda _: session.machine(VM).SuspendVM_Task())
        await asyncio.to_thread(session.wait, task, what="suspend it", timeout_s=60)
        with pytest.raises(Conflict, match="is suspended"):
            await adapter.shutdown(VM, timeout_s=0.0)
        assert (await adapter.inspect(VM)).power_state == "suspended"

    in_session(lambda: VimApi(platform.access()), use)
    assert platform.calls("PowerOffVM_Task") == 0


class Vm:
    """A VM as a session tells of it, in memory. `power`: what each call of its power comes to: an error, and the state after
    it."""

    host = "vc"

    def __init__(self, state: str = "poweredOff", power: tuple[Exception | None, str] = (None, "poweredOn")) -> None:
        self.state, self.power, self.annotation = state, power, "theirs"
        self.calls: list[str] = []
        # What others write to it, each right after it was read.
        self.edits: list[str] = []
        self.version = "1"

    def machine(self, _vm_id: str) -> Any:
        return SimpleNamespace(
            ReconfigVM_Task=lambda spec: lambda: self._reconfigured(spec),
            PowerOnVM_Task=lambda: self._powered,
        )

    def _reconfigured(self, spec: Any) -> None:
        if spec.changeVersion != self.version:
            raise SourceUnreachable("it was changed meanwhile") from library().vim.fault.ConcurrentAccess()
        self.annotation, self.version = spec.annotation, f"{self.version}1"

    def _powered(self) -> None:
        error, self.state = self.power
        if error is not None:
            raise error

    def properties(self, *_: object, **__: object) -> dict[str, str]:
        found = {"name": "web", "runtime.powerState": self.state, "config.annotation": self.annotation}
        found["config.changeVersion"] = self.version
        if self.edits:
            self.annotation, self.version = self.edits.pop(0), f"{self.version}1"
        return found

    def call(self, what: str, use: Callable[[Any], Any]) -> Any:
        self.calls.append(what)
        return use(None)

    def wait(self, task: Callable[[], None], **_: object) -> None:
        task()


def test_a_note_is_added_once_to_what_is_there() -> None:
    vm: Any = Vm()
    for _ in range(2):
        mark(vm, VM, "it has moved")
    assert (vm.annotation, len(vm.calls)) == ("theirs\nit has moved", 1)


def test_what_somebody_writes_while_a_note_is_added_stays() -> None:
    vm: Any = Vm()
    vm.edits = ["ticket 7", "ticket 8"]
    mark(vm, VM, "it has moved")
    assert vm.annotation == "ticket 8\nit has moved"


@pytest.mark.parametrize("before", ["poweredOff", "suspended", "poweredOn"])
@pytest.mark.parametrize("after", ["poweredOff", "poweredOn"])
@pytest.mark.parametrize("error", [None, Internal("it was refused"), SourceUnreachable("it is busy")])
def test_a_call_that_fails_counts_by_what_it_came_to(before: str, after: str, error: Exception | None) -> None:
    """It may have got there without us, or by a call whose answer was lost."""
    vm: Any = Vm(before, (error, after))
    fails = before != "poweredOn" and error is not None and after != "poweredOn"
    with pytest.raises(type(error)) if fails and error is not None else nullcontext():
        power_on(vm, VM)
    assert len(vm.calls) == (before != "poweredOn")
