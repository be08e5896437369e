"""GET /hosts, fencing one, and `synvirt hosts`, on a real server."""

import json
from uuid import uuid4

import httpx
import pytest
from typer.testing import CliRunner

from synvirt.cli import app
from synvirt.model.job import Progress
from synvirt.model.kinds import State
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


@pytest.mark.parametrize(("ttl_s", "rate"), [(-5, 0), (600, 5 << 20)], ids=["lost", "alive"])
def test_a_job_of_a_lost_host_has_no_rate(client: httpx.Client, service: Service, ttl_s: float, rate: int) -> None:
    """Its stored figures are of the moment before the loss."""
    service.store.hosts.begin("kvm2", ttl_s=ttl_s, document="{}")
    progress = Progress(bytes_total=100 << 20, bytes_done=50 << 20, rate_bps=5 << 20, eta_s=10)
    job = service.submit().model_copy(update={"id": uuid4(), "host": "kvm2", "state": State.COPYING_FULL, "progress": progress})
    ended = job.model_copy(update={"id": uuid4(), "state": State.FAILED})
    for one in (job, ended):
        service.store.add(one, host="kvm2")
    service.store.slots.take(job.id, {"destination d": 1}, host="kvm2")
    loaded = client.get(f"/migrations/{job.id}").json()
    listed = {one["id"]: one for one in client.get("/migrations").json()["items"]}
    for shown in (loaded, listed[str(job.id)]):
        assert shown["progress"]["rate_bps"] == rate
        assert shown["progress"]["eta_s"] == (10 if rate else None)
        assert shown["progress"]["bytes_done"] == 50 << 20
    assert listed[str(ended.id)]["progress"]["rate_bps"] == 5 << 20, "as it was stored"
    assert service.intake._figures_elsewhere()[job.id][1].rate_bps == rate


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
