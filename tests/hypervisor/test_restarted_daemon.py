"""A guest boots on while its libvirtd is restarted, as by an upgrade of the host's packages."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from synvirt.errors import DomainDefineFailed, GuestBootFailed, HypervisorAway
from synvirt.hypervisor import eyes, libvirt_host
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.kvm import agent
from tests.needs import need_libvirt

GUEST = UUID(int=1)


@pytest.fixture
def libvirt() -> Any:
    return need_libvirt()


def daemon(libvirt: Any, *, gone: bool = False, ends_when_asked: bool = False) -> tuple[Any, list[int]]:
    """A connection with one running guest, and the number of its answers that is left. `ends_when_asked`: for the guest's
    state."""
    left = [10_000]

    def refuse(*_: object) -> Any:
        raise libvirt.libvirtError("client socket is closed")

    def state() -> list[int]:
        left[0] = 0 if ends_when_asked else left[0]
        return refuse() if left[0] == 0 else [libvirt.VIR_DOMAIN_RUNNING, 1]

    def look_up(_uuid: str) -> Any:
        if gone:
            error = libvirt.libvirtError("no domain with matching uuid")
            error.err = (libvirt.VIR_ERR_NO_DOMAIN, 10, "no domain", 2, None, None, None, 0, 0)
            raise error
        return domain

    connection = SimpleNamespace(isAlive=lambda: left[0] > 0, lookupByUUIDString=look_up, domainEventRegisterAny=refuse)
    domain = SimpleNamespace(
        connect=lambda: connection, name=lambda: "web", state=state, blockStats=refuse, memoryPeek=refuse, XMLDesc=refuse
    )
    return connection, left


def booted(monkeypatch: pytest.MonkeyPatch, folder: Path, before: tuple[Any, list[int]], *after: Any, within_s: float) -> str:
    """Waits for a guest whose daemon ends after the first look. `after`: what each new connection gives."""
    connections = iter([before[0], before[0], *after])
    looks: list[Any] = []

    def use() -> Any:
        found = next(connections, after[-1])
        if isinstance(found, Exception):
            raise found
        return found

    def answers(domain: Any) -> bool:
        before[1][0] = 0
        looks.append(domain)
        return len(looks) > 1

    monkeypatch.setattr(libvirt_host, "POLL_S", 0.01)
    monkeypatch.setattr(agent, "answers", answers)
    host = LibvirtHost("qemu:///system", folder)
    monkeypatch.setattr(host, "_connection", SimpleNamespace(use=use))
    monkeypatch.setattr(eyes, "screenshot", lambda *_: None)
    return host.wait_until_booted(GUEST, within_s, lambda: False)


def test_a_guest_is_looked_at_by_a_new_connection(libvirt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    away = DomainDefineFailed("the hypervisor cannot be opened")
    assert booted(monkeypatch, tmp_path, daemon(libvirt), away, away, daemon(libvirt)[0], within_s=60) == "agent"


def test_a_guest_is_not_taken_for_gone_whose_daemon_ends_during_a_look(
    libvirt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends, (connection, _) = daemon(libvirt, ends_when_asked=True), daemon(libvirt)
    assert booted(monkeypatch, tmp_path, ends, connection, within_s=60) == "agent"


def test_a_daemon_that_stays_away_ends_the_wait(libvirt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    away = DomainDefineFailed("the hypervisor cannot be opened")
    with pytest.raises(GuestBootFailed):
        booted(monkeypatch, tmp_path, daemon(libvirt), away, within_s=0.2)


def test_a_guest_that_is_gone_afterwards_has_not_booted(libvirt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(GuestBootFailed, match="is gone"):
        booted(monkeypatch, tmp_path, daemon(libvirt), daemon(libvirt, gone=True)[0], within_s=0.2)


def host_with(monkeypatch: pytest.MonkeyPatch, folder: Path, connection: Any) -> LibvirtHost:
    host = LibvirtHost("qemu:///system", folder)
    monkeypatch.setattr(host, "_connection", SimpleNamespace(use=lambda: connection))
    return host


def lost(libvirt: Any, *_: object) -> Any:
    error = libvirt.libvirtError("End of file while reading data: Input/output error")
    error.err = (libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_FROM_RPC, str(error), 2, None, None, None, 0, 0)
    raise error


def test_the_networks_are_not_a_part_of_them(libvirt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plan that names one of the others would be refused, and a wave's member would fail."""
    host = host_with(monkeypatch, tmp_path, SimpleNamespace(listAllNetworks=partial(lost, libvirt)))
    with pytest.raises(HypervisorAway):
        host.networks()


def test_a_driver_without_networks_has_the_default(libvirt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> Any:
        raise libvirt.libvirtError("this function is not supported by the connection driver")

    host = host_with(monkeypatch, tmp_path, SimpleNamespace(listAllNetworks=refuse))
    assert host.networks()[0] == "network:default"


@pytest.mark.parametrize("ask", [LibvirtHost.addresses, LibvirtHost.guest_facts])
@pytest.mark.parametrize("answered", [0, 1])
def test_an_agent_that_cannot_be_asked_has_not_answered(
    libvirt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ask: Callable[[LibvirtHost, UUID], Any], answered: int
) -> None:
    """`answered`: how often it has answered when the connection is lost. A guest without an address would not be healthy."""
    import libvirt_qemu

    left = [answered]

    def command(*_: object) -> str:
        if left[0] == 0:
            lost(libvirt)
        left[0] -= 1
        return '{"return": {}}'

    monkeypatch.setattr(libvirt_qemu, "qemuAgentCommand", command)
    domain = SimpleNamespace(name=lambda: "web")
    host = host_with(monkeypatch, tmp_path, SimpleNamespace(lookupByUUIDString=lambda _: domain))
    if ask is LibvirtHost.addresses and answered:
        assert ask(host, GUEST) == []
        return
    with pytest.raises(HypervisorAway):
        ask(host, GUEST)
