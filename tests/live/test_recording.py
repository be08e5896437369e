"""What a control plane answered at a site, written down without secrets and names, replays as that site did."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.errors import BadRequest
from synvirt.live import SourceAccess
from synvirt.live.proxmox.adapter import PveApi
from synvirt.live.recording import Scrubbed
from synvirt.migrations.sources.registered import Sources
from synvirt.model.machine import VmManifest
from synvirt.model.sources import Source, SourceRequest
from tests.contracts.live import in_session
from tests.fakes.live import FakePlatform
from tests.fakes.platforms import with_fake
from tests.fakes.pve.cluster import Cluster, Paper
from tests.fakes.pve.server import PveServer
from tests.fakes.service import Service
from tests.running.ports import free_port
from tests.servers.replay import replayed

PRIVATE: tuple[str, ...] = ("payroll", "secretnode", "10.11.12.13", "bc:24:11:aa:bb:cc", "Alice", "alice@corp.example")
PRIVATE += ("6f0e8c7a-2d0f-4c9e-9d7a-1e1f0c9f4b11", "t0ken", "mover", "fastpool", "vlanbridge")
NETWORK = "virtio=BC:24:11:AA:BB:CC,bridge=vlanbridge,tag=7"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PveServer]:
    (folder := tmp_path / "site").mkdir()
    machines = Paper()
    cluster = Cluster(machines, nodes={"secretnode": "10.11.12.13"})
    cluster.storages = {"fastpool": "zfspool"}
    cluster.add(
        100,
        "secretnode",
        name="payroll",
        description="Ask Alice, alice@corp.example",
        scsi0="fastpool:vm-100-disk-0,size=8G",
        net0=NETWORK,
        smbios1="uuid=6f0e8c7a-2d0f-4c9e-9d7a-1e1f0c9f4b11",
        agent="1",
    )
    cluster.volumes["fastpool:vm-100-disk-0"] = {"format": "raw", "size": 8 << 30, "used": 1 << 30, "vmid": 100}
    machines.start(100)
    machines.answers["get-osinfo"] = {"id": "debian", "pretty-name": "Debian GNU/Linux 12"}
    card = {"hardware-address": "bc:24:11:aa:bb:cc", "ip-addresses": [{"ip-address": "10.11.12.13"}]}
    machines.answers["network-get-interfaces"] = [card]
    with PveServer(cluster, folder) as running:
        yield running


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    service = Service(tmp_path / "service", platforms=with_fake(FakePlatform(tmp_path / "platform")))
    yield service.sources
    service.close()


def added(sources: Sources, site: PveServer, **more: str) -> Source:
    credentials = {"token_id": "mover@pve!synvirt", "token_secret": "t0ken", **more}
    options = {"fingerprint_sha256": site.fingerprint}
    request = {"name": "s", "kind": "pve_api", "endpoint": site.endpoint, "credentials": credentials, "options": options}
    return sources.add(SourceRequest.model_validate(request))


def test_a_site_replays_as_it_was_and_nothing_private_is_in_its_file(sources: Sources, site: PveServer, tmp_path: Path) -> None:
    source = added(sources, site)
    text = asyncio.run(sources.record(source.id))
    for one in PRIVATE:
        assert one.lower() not in text.lower(), one
    with replayed(text, tmp_path) as (endpoint, fingerprint, replay):
        access = SourceAccess(
            endpoint, {"token_id": "any@pve!token", "token_secret": "any"}, {"fingerprint_sha256": fingerprint}
        )

        async def use(adapter: PveApi) -> tuple[VmManifest, str]:
            assert (await adapter.about()).version == "8.4.1"
            (row,) = await adapter.list_vms()
            return await adapter.inspect(row.vm_id), row.name

        again, name = in_session(lambda: PveApi(access), use)
        assert replay.unknown == []
    before = asyncio.run(sources.inspect(source.id, "100"))
    assert (again.name, again.power_state, again.guest_os) == (name, "on", before.guest_os)
    assert [(disk.key, disk.capacity_bytes, disk.used_bytes) for disk in again.disks] == [("scsi0", 8 << 30, 1 << 30)]
    # What belongs together still does: the agent's card is the configuration's.
    assert again.nics[0].ip_addresses
    assert again.nics[0].mac == "02:00:00:00:00:01"
    assert again.uuid == "00000000-0000-4000-8000-000000000001"
    assert again.host.startswith("name-")


def test_a_password_is_in_no_line(sources: Sources, site: PveServer) -> None:
    site.cluster.users["root@pam"].secret = "p4ss w0rd&more"
    credentials = {"user": "root@pam", "password": "p4ss w0rd&more"}
    request = {"name": "s", "kind": "pve_api", "endpoint": site.endpoint, "credentials": credentials}
    # A password is one for SSH, too: nobody answers it here, and nobody is to be waited for.
    site.cluster.nodes["secretnode"] = "127.0.0.1"
    request["options"] = {"fingerprint_sha256": site.fingerprint, "ssh_port": free_port()}
    source = sources.add(SourceRequest.model_validate(request))
    text = asyncio.run(sources.record(source.id))
    logins = [json.loads(line)["request"] for line in text.splitlines()[1:] if "access/ticket" in line]
    assert logins[0]["body"]["password"] == "(redacted)"
    for private in ("p4ss", "w0rd", *site.tickets, *(csrf for _, csrf, _ in site.tickets.values())):
        assert private not in text


def test_a_platform_that_is_not_spoken_to_by_http_is_refused(sources: Sources) -> None:
    request = {"name": "f", "kind": "libvirt_remote", "endpoint": "qemu:///system"}
    with pytest.raises(BadRequest, match="not recorded"):
        asyncio.run(sources.record(sources.add(SourceRequest.model_validate(request)).id))


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("10.0.0.1 and 10.0.0.2, 10.0.0.1", "198.18.0.1 and 198.18.0.2, 198.18.0.1"),
        ("fe80::1", "2001:db8::1"),
        ("127.0.0.1", "127.0.0.1"),
        ("QEMU 9.2.0, pve-manager/8.4.1-2", "QEMU 9.2.0, pve-manager/8.4.1-2"),
        ("12:34:56", "12:34:56"),
        ("AA-BB-CC-DD-EE-FF aa:bb:cc:dd:ee:ff", "02:00:00:00:00:01 02:00:00:00:00:01"),
        ("vm-web01-disk", "vm-name-1-disk"),
        ("web010", "web010"),
    ],
)
def test_the_same_becomes_the_same(given: str, becomes: str) -> None:
    scrub = Scrubbed(())
    scrub.learn_names(["web01"])
    assert scrub.text(given) == becomes


def test_names_are_found_in_all_answers_and_in_keys() -> None:
    scrub = Scrubbed(["hunter2"])
    body: Any = {"data": [{"name": "erp", "node": "n17", "vmid": 100, "acl": {"/storage/erp-data": 1}, "x": "hunter2"}]}
    scrub.learn(body)
    assert scrub.value(body) == {
        "data": [{"name": "name-1", "node": "name-2", "vmid": 100, "acl": {"/storage/name-1-data": 1}, "x": "(redacted)"}]
    }
    assert scrub.path("/nodes/n17/qemu/100") == "/nodes/name-2/qemu/100"
