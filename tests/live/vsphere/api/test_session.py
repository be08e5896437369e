"""vim_api's session when something goes wrong: passwords, certificates, lost sessions, a platform that is busy or silent."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks import open_reader
from synvirt.disks.specs import DatastoreSpec
from synvirt.errors import AuthFailed, SourceUnreachable
from synvirt.live import SourceAccess
from synvirt.live.vsphere import session as session_module
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.privileges import EXPORT, PRIVILEGES
from synvirt.live.vsphere.session import library
from tests.cases import cases
from tests.fakes.vcenter import USER, VCenter
from tests.live.vsphere.api.asking import VM, ask, content, opened, tracked

# The simulator is built by whoever comes first.
pytestmark = pytest.mark.timeout(600)


def test_a_wrong_password(platform: VCenter) -> None:
    with pytest.raises(AuthFailed, match=USER) as refused:
        ask(platform.access(password="wr0ng"), lambda adapter: adapter.list_vms())
    assert "wr0ng" not in str(refused.value)


def test_nobody_listens() -> None:
    with pytest.raises(SourceUnreachable):
        ask(SourceAccess("https://127.0.0.1:1", {"user": "u", "password": "p"}), lambda adapter: adapter.list_vms())


def test_a_certificate_that_nobody_signed_is_not_trusted(platform: VCenter) -> None:
    before = platform.calls("Login")
    with pytest.raises(SourceUnreachable, match="not trusted"):
        ask(platform.access(verify_tls=True), lambda adapter: adapter.list_vms())
    assert platform.calls("Login") == before
    assert ask(platform.access(verify_tls=False), lambda adapter: adapter.list_vms())


def test_a_certificate_that_changed_gets_no_password(platform: VCenter, spec: DatastoreSpec) -> None:
    platform.control("certificate")
    before = platform.calls("Login")
    with pytest.raises(SourceUnreachable, match="is not the pinned one"):
        ask(platform.access(), lambda adapter: adapter.list_vms())
    with pytest.raises(SourceUnreachable, match="is not the pinned one"):
        open_reader(spec)
    assert platform.calls("Login") == before


def test_a_session_that_was_lost_is_made_again(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> bytes:
        spec, _ = await opened(adapter, "synvirt-a-1")
        reader = open_reader(spec)
        for number in range(4):
            platform.control("sessions")
            assert (await adapter.inspect(VM)).name == "DC0_H0_VM0"
            buffer = bytearray(1 << 20)
            await asyncio.to_thread(reader.read_into, number << 20, memoryview(buffer))
            assert buffer == content()[number << 20 : (number + 1) << 20]
        await asyncio.to_thread(reader.close)
        await adapter.cleanup(VM, "synvirt-a-1")
        return b""

    ask(platform.access(), use)
    assert platform.snapshots() == []


def test_a_password_that_was_changed_meanwhile(platform: VCenter, spec: DatastoreSpec) -> None:
    with pytest.raises(AuthFailed, match="refused our login"):
        open_reader(replace(spec, password="0ld"))


def test_a_missing_privilege_is_named(platform: VCenter, disk: Path) -> None:
    platform.fault("CreateSnapshot_Task", "NoPermission")
    with pytest.raises(AuthFailed, match=r"VirtualMachine\.State\.CreateSnapshot"):
        ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1"))


@pytest.mark.parametrize("kind", ["refuse", "status:503"])
def test_a_platform_that_stops_answering_in_the_middle(platform: VCenter, disk: Path, kind: str) -> None:
    platform.fault("CreateSnapshot_Task", kind)
    with pytest.raises(SourceUnreachable, match="does not answer"):
        ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1"))
    assert ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1")).id


BUSY = (
    "TaskInProgress",
    "HostNotConnected",
    "HostNotReachable",
    "HostCommunication",
    "Timedout",
    "FileLocked",
    "ConcurrentAccess",
)


@pytest.mark.parametrize("kind", BUSY)
def test_what_passes_by_itself_is_asked_again_wherever_it_is_reported(kind: str) -> None:
    """By a call, and by a task that it started."""
    vmware = library()
    fault = getattr(vmware.vim.fault, kind, None) or getattr(vmware.vmodl.fault, kind)
    session = VimApi(SourceAccess("https://vcenter", {"user": "u", "password": "p"}))._session
    with pytest.raises(SourceUnreachable, match=kind) as reported, session.mapped("do it"):
        raise fault
    assert "asked again" in str(reported.value.hint)
    session.properties = lambda *_, **__: {"info.state": "error", "info.error": fault()}  # type: ignore[method-assign]
    with pytest.raises(SourceUnreachable, match=kind):
        session.wait("task-1", what="do it", timeout_s=1)


SPOKEN_TO = ("RetrieveServiceContent", "Login", "RetrievePropertiesEx", "CreateContainerView", "QueryChangedDiskAreas")


@pytest.mark.parametrize("method", SPOKEN_TO)
def test_a_trouble_inside_the_platform_passes_whatever_it_was_asked(platform: VCenter, disk: Path, method: str) -> None:
    """SystemError: a vCenter that restarts, or whose single sign-on does."""

    async def use(adapter: VimApi) -> None:
        await tracked(adapter)
        _, since = await opened(adapter, "synvirt-a-1")
        await adapter.snapshot(VM, "synvirt-a-2")
        if method not in SPOKEN_TO[:2]:
            platform.fault(method, "SystemError")
            with pytest.raises(SourceUnreachable, match="SystemError"):
                await (adapter.list_vms() if method == "CreateContainerView" else opened(adapter, "synvirt-a-2", since))
        assert await opened(adapter, "synvirt-a-2", since)
        for name in ("synvirt-a-1", "synvirt-a-2"):
            await adapter.cleanup(VM, name)

    if method in SPOKEN_TO[:2]:
        platform.fault(method, "SystemError")
        with pytest.raises(SourceUnreachable, match="SystemError"):
            ask(platform.access(), use)
    ask(platform.access(), use)


def test_an_answer_that_takes_long_is_given_more_time_each_time(
    platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times the same limit would fail three times, and hold a snapshot meanwhile."""
    monkeypatch.setattr(session_module, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(session_module, "ANSWERS", session_module._Answers())
    limits: list[str] = []

    async def use(adapter: VimApi) -> None:
        await adapter.inspect(VM)

    for _ in range(3):
        platform.fault("RetrievePropertiesEx", "hang:20000")
        with pytest.raises(SourceUnreachable, match="did not answer within") as reported:
            ask(platform.access(), use)
        limits.append(str(reported.value.hint).partition(";")[0])
    assert limits == [f"it is asked again, and given {grown} s" for grown in (1, 2, 4)]
    ask(platform.access(), use)


def test_closing_does_not_wait_for_a_platform_that_hangs(
    platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "LOGOUT_TIMEOUT_S", 0.2)
    platform.fault("Logout", "hang:60000")

    async def use(adapter: VimApi) -> float:
        began = time.monotonic()
        await adapter.close()
        return time.monotonic() - began

    assert ask(platform.access(), use) < 30


def test_another_server_at_the_endpoint_is_said_in_words(platform: VCenter) -> None:
    platform.fault("RetrieveServiceContent", "html")
    with pytest.raises(SourceUnreachable) as reported:
        ask(platform.access(), lambda adapter: adapter.list_vms())
    assert "NoneType" not in reported.value.detail
    assert "vSphere" in reported.value.detail


def test_a_task_that_its_platform_has_forgotten_is_no_vm_that_is_gone(platform: VCenter, disk: Path) -> None:
    """As a vCenter does that is restarted in the middle of a removal."""

    async def use(adapter: VimApi) -> None:
        forgotten = library().vim.Task("task-4711", adapter._session._stub)
        with pytest.raises(SourceUnreachable, match="no longer knows the task"):
            await asyncio.to_thread(adapter._session.wait, forgotten, what="remove a snapshot", timeout_s=5)

    ask(platform.access(), use)


def test_a_session_that_was_lost_is_made_again_once_however_many_ask(platform: VCenter) -> None:
    async def use(adapter: VimApi) -> None:
        before = platform.calls("Login")
        for number in range(1, 4):
            platform.control("sessions")
            await asyncio.gather(*(adapter.inspect(VM) for _ in range(8)))
            assert (platform.calls("Login"), platform.sessions()) == (before + number, 1)

    ask(platform.access(), use)


def test_a_session_is_kept_alive_and_made_again_while_nobody_asks(platform: VCenter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.live.vsphere.adapter.KEEP_ALIVE_S", 0.05)

    async def use(adapter: VimApi) -> None:
        while platform.calls("CurrentTime") < 2:
            await asyncio.sleep(0.02)
        platform.control("sessions")
        while platform.sessions() == 0:
            await asyncio.sleep(0.02)

    ask(platform.access(), use)
    assert platform.sessions() == 0


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6))
@cases(50)
def test_a_list_that_comes_in_pages_is_whole_and_in_order(pages: list[list[int]]) -> None:
    """The simulator gives all at once, whatever it is asked; vCenter does not."""

    class Collector:
        def page(self, number: int) -> Any:
            objects = [SimpleNamespace(obj=SimpleNamespace(_moId=str(one)), propSet=None) for one in pages[number]]
            return SimpleNamespace(objects=objects, token=str(number + 1) if number + 1 < len(pages) else None)

        def RetrievePropertiesEx(self, _filters: object, options: Any) -> Any:  # noqa: N802 - VMware's name
            assert options.maxObjects
            return self.page(0) if pages else None

        def ContinueRetrievePropertiesEx(self, token: str) -> Any:  # noqa: N802 - VMware's name
            return self.page(int(token))

    session = VimApi(SourceAccess("https://vcenter", {"user": "u", "password": "p"}))._session
    rows = session._retrieved(SimpleNamespace(propertyCollector=Collector()), [])
    assert [row.id for row in rows] == [str(one) for page in pages for one in page]


def test_each_call_that_wants_a_privilege_has_it_in_our_list() -> None:
    """By VMware's own word: pyvmomi knows of each method what it wants."""
    vim = library().vim
    machine, snapshot = vim.VirtualMachine, vim.vm.Snapshot
    called = [
        machine.CreateSnapshot,
        machine.QueryChangedDiskAreas,
        machine.PowerOff,
        machine.PowerOn,
        snapshot.Remove,
        snapshot.ExportSnapshot,
    ]
    wanted = {method.info.privId for method in called}
    listed = {name for name, _ in (*PRIVILEGES, EXPORT)}
    assert wanted - {None, "System.Anonymous", "System.Read"} <= listed, wanted
