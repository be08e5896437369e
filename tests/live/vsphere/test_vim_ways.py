"""A deep test of a vCenter: each way to a disk tried and measured, each host looked at from here."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from synvirt.live.vsphere import hosts as vim_hosts
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.form import FORM
from synvirt.migrations.sources.probing import measured_rates, probe
from synvirt.model.sources import SourceCheck, SourceTest
from synvirt.store.sources import Trial
from synvirt.transport import tls
from tests.fakes.vcenter import VCenter

# The simulator is built by whoever comes first.
pytestmark = pytest.mark.timeout(600)

VM = "vm-57"


@asynccontextmanager
async def noted(vm_id: str) -> AsyncIterator[Trial]:
    yield Trial(uuid4(), vm_id, f"synvirt-trial-{uuid4()}")


def deep(platform: VCenter, **options: Any) -> tuple[SourceTest, dict[str, SourceCheck]]:
    platform.add_disk(VM, random.Random(4).randbytes(3 << 20))
    access = platform.access(fingerprint_sha256=platform.fingerprint, **options)
    _, _, read = FORM.read(access)
    found = asyncio.run(probe(VimApi(access), None, read, deep=noted, vm_id=VM))
    return found, {one.name: one for one in found.checks}


def test_each_way_is_tried_and_measured(platform: VCenter) -> None:
    found, checks = deep(platform)
    assert found.ok, found.checks
    for way in ("datastore", "lease"):
        assert not checks[f"way {way}"].warning
        assert "read 3145728 bytes" in checks[f"way {way}"].detail
        assert "MiB/s" in checks[f"way {way}"].detail
    rates = measured_rates(found)
    assert rates.keys() == {"datastore", "lease"}
    assert min(rates.values()) > 0
    assert "way vddk" not in checks
    assert (platform.snapshots(), platform.leases(), platform.sessions()) == ([], 0, 0)


def test_a_way_that_does_not_do_is_a_warning_and_spoils_no_other(platform: VCenter) -> None:
    platform.fault("ExportSnapshot", "NoPermission", times=9)
    found, checks = deep(platform, vddk_libdir="/nonexistent", transport="datastore")
    assert found.ok, found.checks
    assert not checks["way datastore"].warning
    assert (checks["way lease"].warning, "E_MIG_AUTH_FAILED" in checks["way lease"].detail) == (True, True)
    assert checks["way vddk"].warning
    assert platform.snapshots() == []


def test_hosts_whose_names_lead_nowhere_are_reported(platform: VCenter, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the simulator's: nobody's DNS has them."""
    known = socket.getaddrinfo

    def resolved(name: Any, *args: Any, **options: Any) -> Any:
        if str(name).startswith("DC0_"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(name, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    found, checks = deep(platform)
    hosts = [one for name, one in checks.items() if name.startswith("host ")]
    assert found.ok
    assert len(hosts) > 1
    assert all(one.warning and "does not resolve to an address" in one.detail for one in hosts)


@pytest.mark.parametrize(
    ("thumbprint", "by_vddk", "trouble"),
    [
        ("", False, None),
        ("own SHA-1", False, None),
        ("own SHA-256", False, None),
        ("AA:" * 19 + "AA", False, "another certificate"),
        ("", True, "accepts no connection"),
    ],
)
def test_a_host_is_asked_as_it_will_be_when_it_sends(
    platform: VCenter, monkeypatch: pytest.MonkeyPatch, thumbprint: str, by_vddk: bool, trouble: str | None
) -> None:
    host, _, port = platform.url.removeprefix("https://").partition(":")
    monkeypatch.setattr(vim_hosts, "HTTPS_PORT", int(port))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setattr(vim_hosts, "VDDK_PORT", closed.getsockname()[1])
    if thumbprint.startswith("own"):
        thumbprint = tls.fingerprint(tls.look(host, int(port)).der, thumbprint.removeprefix("own "))
    reported = {"name": host, "runtime.connectionState": "connected", "summary.config.sslThumbprint": thumbprint}
    check = vim_hosts._check(reported, by_vddk=by_vddk)
    assert (check.ok, check.warning) == (True, trouble is not None)
    assert (trouble or "as they should be") in check.detail


def test_a_host_that_vcenter_does_not_reach_is_reported() -> None:
    check = vim_hosts._check({"name": "esx1", "runtime.connectionState": "notResponding"}, by_vddk=False)
    assert check.warning
    assert "notResponding" in check.detail
