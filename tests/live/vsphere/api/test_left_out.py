"""vim_api without pyvmomi: skipped by its user, or not installed."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import structlog

from synvirt.errors import BadRequest, Internal
from synvirt.live import SourceAccess
from synvirt.live.registry import BY_KIND
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.session import warn_if_missing
from synvirt.model.kinds import LiveKind
from tests.live.vsphere.api.asking import VM


@pytest.fixture(params=["skipped", "not installed"])
def _left_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "skipped":
        monkeypatch.setenv("SYNVIRT_MIGRATOR_SKIP_GO_SHIM", "1")
        return

    def missing() -> None:
        raise ImportError("pyVmomi")

    monkeypatch.setattr("synvirt.live.vsphere.session._imported", missing)


@pytest.mark.usefixtures("_left_out")
def test_every_entry_of_the_control_plane_answers_internal() -> None:
    adapter = VimApi(SourceAccess("https://127.0.0.1:1", {"user": "u", "password": "p"}))
    entries: list[Callable[[], Awaitable[object]]] = [
        adapter.connect,
        adapter.about,
        adapter.supports_warm,
        adapter.list_vms,
        lambda: adapter.inspect(VM),
        lambda: adapter.enable_cbt(VM, []),
        lambda: adapter.snapshot(VM, "s"),
        lambda: adapter.shutdown(VM),
        lambda: adapter.power_on(VM),
        lambda: adapter.mark(VM, "note"),
        lambda: adapter.release(VM, "s"),
        lambda: adapter.cleanup(VM, "s"),
    ]

    async def asked(entry: Callable[[], Awaitable[object]]) -> None:
        await entry()

    for entry in entries:
        with pytest.raises(Internal, match="control plane"):
            asyncio.run(asked(entry))
    asyncio.run(adapter.close())


@pytest.mark.usefixtures("_left_out")
def test_the_service_says_at_its_start_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.live.vsphere.session.find_spec", lambda _: None)
    with structlog.testing.capture_logs() as lines:
        warn_if_missing()
    assert [(line["log_level"], line["event"]) for line in lines] == [("warning", "vSphere is not served")]


def test_a_malformed_source_is_refused() -> None:
    for access in (
        SourceAccess("http://vcenter", {"user": "u", "password": "p"}),
        SourceAccess("https://vcenter", {"user": "u"}),
        SourceAccess("https://vcenter", {"user": "u", "password": "p"}, {"transport": "pigeon"}),
        SourceAccess("https://vcenter", {"user": "u", "password": "p"}, {"transport": "vddk"}),
        SourceAccess("https://vcenter", {"user": "u", "password": "p"}, {"vddk_libdir": "not absolute"}),
    ):
        with pytest.raises(BadRequest):
            BY_KIND[LiveKind.VIM_API].open(access)
