"""GET /hosts, fencing one, and `synvirt hosts`, on a real server."""

import json

import httpx
from typer.testing import CliRunner

from synvirt.cli import app
from tests.fakes.service import Service

SAID = json.dumps(
    {
        "name": "kvm2.lan",
        "version": "1",
        "destinations": [{"name": "rbd", "kind": "rbd", "free_bytes": 7}],
        "room": {"free_memory_bytes": 8 << 30, "free_cpus": 12, "networks": ["user"]},
    }
)


def test_hosts_are_shown_with_their_leases(client: httpx.Client, service: Service) -> None:
    service.store.hosts.begin("kvm1", ttl_s=-5, document="{}")
    service.store.hosts.begin("kvm2", ttl_s=600, document=SAID)
    away, alive = client.get("/hosts").json()["items"]
    assert (away["id"], away["name"], away["state"], away["destinations"]) == ("kvm1", "kvm1", "away", [])
    assert (alive["state"], alive["name"], alive["version"], alive["jobs"]) == ("alive", "kvm2.lan", "1", 0)
    assert alive["destinations"] == [{"name": "rbd", "kind": "rbd", "free_bytes": 7, "shared_id": None}]
    assert alive["room"] == {
        "free_memory_bytes": 8 << 30,
        "free_cpus": 12,
        "networks": ["user"],
        "unreachable_sources": [],
    }
    assert away["room"] is None
    assert alive["seen_at"].endswith("Z")


def test_a_host_is_fenced_by_the_command_line(client: httpx.Client, service: Service) -> None:
    fence = service.store.hosts.begin("kvm2", ttl_s=600, document=SAID)
    argv = ["hosts", "fence", "kvm2", "--data-dir", str(service.settings.data_dir)]
    assert CliRunner().invoke(app, argv, input="n\n").exit_code != 0
    assert client.get("/hosts").json()["items"][0]["state"] == "alive"
    assert CliRunner().invoke(app, [*argv, "--yes"]).exit_code == 0
    assert not service.store.hosts.renew(fence, ttl_s=600, document=SAID)
    shown = CliRunner().invoke(app, ["hosts", "list", "--data-dir", str(service.settings.data_dir)])
    assert "fenced" in shown.output
    assert "kvm2.lan" in shown.output
    assert "8.0 GiB, 12 CPUs" in shown.output


def test_neither_this_host_nor_an_unknown_one_is_fenced(client: httpx.Client) -> None:
    here, unknown = client.post("/hosts/local/fence"), client.post("/hosts/nobody/fence")
    assert (here.status_code, here.json()["code"]) == (409, "E_MIG_CONFLICT")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "E_MIG_NOT_FOUND")
