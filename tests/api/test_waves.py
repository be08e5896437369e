"""/waves on a real server: made, listed, exported, approved, told of; nothing moves, for there is no engine."""

import csv
import io
import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from typer.testing import CliRunner

from synvirt.cli import app
from synvirt.fleet.changing import change_members
from synvirt.fleet.forecasting import WhatIf
from synvirt.fleet.model import Hook, MemberState, WaveRequest, WaveState
from synvirt.fleet.waves import check
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.values import now
from synvirt.sizes import MIB
from synvirt.store.tables import waves
from tests.api.conftest import with_the_page
from tests.fakes.live import FakePlatform
from tests.fakes.platforms import with_fake
from tests.fakes.service import PLAN, Service
from tests.fleet.made import plan

WAVES = "http://synvirt/api/v1/waves"
SOURCE = {"name": "fake", "kind": "libvirt_remote", "endpoint": "qemu:///system"}


def body(*names: str, **more: Any) -> dict[str, Any]:
    members = [{"id": name, "vm": f"=VM {name}", "plan": json.loads(plan(name).model_dump_json())} for name in names]
    return {"name": "night", "members": members, **more}


def test_a_wave_is_made_shown_replaced_and_removed(client: httpx.Client, service: Service) -> None:
    made = client.post(WAVES, json=body("a", "b"))
    assert made.status_code == 201, made.text
    assert made.headers["Location"].endswith(made.json()["id"])
    url = f"{WAVES}/{made.json()['id']}"
    assert client.get(url).json() == made.json()
    assert [one["state"] for one in made.json()["members"]] == ["waiting", "waiting"]
    listed = client.get(WAVES, params={"state": "draft", "name": "night"}).json()["items"]
    assert [(one["name"], one["counts"]) for one in listed] == [("night", {"waiting": 2})]
    assert client.get(WAVES, params={"name": "other"}).json()["items"] == []
    exported = client.get(f"{url}/export").json()
    assert client.put(url, json=exported | {"name": "later"}).json()["name"] == "later"
    page = client.get(f"{url}/members", params={"limit": 1}).json()
    assert [one["id"] for one in page["items"]] == ["a"]
    rest = client.get(f"{url}/members", params={"cursor": page["next_cursor"]}).json()
    assert ([one["id"] for one in rest["items"]], rest["next_cursor"]) == (["b"], None)
    assert client.delete(url).status_code == 204
    assert client.get(url).status_code == 404


def test_a_wave_that_cannot_be_read_is_an_error_and_not_half_an_answer(client: httpx.Client, service: Service) -> None:
    made = client.post(WAVES, json=body("a")).json()
    with service.store._writing() as db:
        db.execute(waves.update().where(waves.c.id == made["id"]).values(version="2.0"))
    answer = client.get(f"{WAVES}/{made['id']}")
    assert (answer.status_code, answer.json()["code"]) == (500, "E_MIG_INTERNAL")
    assert "synvirt doctor" in answer.json()["hint"]


def test_what_is_wrong_with_a_wave_is_named_and_nothing_is_kept(client: httpx.Client) -> None:
    cycle = body("a", "b")
    cycle["members"][0]["after"], cycle["members"][1]["after"] = ["b"], ["a"]
    refused = client.post(WAVES, json=cycle)
    assert (refused.status_code, refused.json()["code"]) == (400, "E_MIG_INVALID_PLAN")
    assert "a → b → a" in refused.json()["detail"]
    unknown = client.get(WAVES, params={"sate": "draft"})
    assert (unknown.status_code, "did you mean state" in unknown.json()["hint"]) == (400, True)
    cold = body("a", windows=[{"id": "w", "name": "w", "start": "2030-01-01T00:00:00", "end": "2030-01-01T04:00:00"}])
    cold["members"][0]["plan"]["mode"] = "Cold"
    assert "outage_budget_s" in client.post(WAVES, json=cold).json()["detail"]
    assert "has no offset" in client.post(WAVES, json=body("a", start_at="2030-01-01T00:00:00")).json()["detail"]
    assert (
        "outside of the calendar" in client.post(WAVES, json=body("a", start_at="9999-12-31T23:59:59-14:00")).json()["detail"]
    )
    past = now() - timedelta(hours=2)
    assert "start_at is in the past" in client.post(WAVES, json=body("a", start_at=past.isoformat())).json()["detail"]
    assert "start_at: must be a time" in client.post(WAVES, json=body("a", start_at=5)).json()["detail"]
    for hook, named in (
        ({"url": "https://ops.example/hook", "secret": "s"}, "secret"),
        ({"url": "https://ops.example/hook"}, "a url and a secret"),
        ({"url": "ftp://ops.example/hook", "secret": "s" * 16}, "url"),
        ({"command": "none"}, "the settings have no command none"),
    ):
        assert named in client.post(WAVES, json=body("a", hooks=[hook])).json()["detail"], hook
    assert client.get(WAVES).json()["items"] == []


def test_a_canary_that_a_wave_has_not_is_not_approved(client: httpx.Client) -> None:
    wave_id = client.post(WAVES, json=body("a")).json()["id"]
    refused = client.post(f"{WAVES}/{wave_id}/approve", json={"canary": True})
    assert refused.status_code == 400
    assert refused.json()["detail"] == "canary: this wave has none"


def test_wishes_move_a_wave_and_are_on_the_stream_and_in_the_audit_trail(client: httpx.Client, service: Service) -> None:
    request = body("a", "b", canary={"count": 1, "gate": "approval"})
    request["members"][1]["approvers"] = ["db team"]
    wave_id = client.post(WAVES, json=request).json()["id"]
    url = f"{WAVES}/{wave_id}"
    assert client.post(f"{url}/hold").status_code == 409
    assert client.post(f"{url}/go").json()["state"] == "running"
    assert client.post(f"{url}/hold").json()["reason"] == "It was held by local."
    refused = client.post(f"{url}/approve", json={"approver": "canary"})
    assert refused.status_code == 400
    # Who may be meant, and how the canary is approved, is not to be guessed.
    assert "db team" in refused.json()["hint"]
    assert "canary: true" in refused.json()["hint"]
    assert client.post(f"{url}/approve", json={"approver": "db team"}).status_code == 202
    assert client.post(f"{url}/approve", json={"canary": True}).status_code == 202
    whole = client.get(url).json()
    assert whole["canary_approval"]["account"] == "local"
    assert [one["approver"] for one in whole["members"][1]["approvals"]] == ["db team"]
    assert client.post(f"{url}/members/a/skip").json()["state"] == "skipped"
    assert client.post(f"{url}/members/a/retry").json()["state"] == "waiting"
    assert client.post(f"{url}/members/nobody/skip").status_code == 404
    assert client.post(f"{url}/retry").json()["code"] == "E_MIG_CONFLICT"
    assert client.post(f"{url}/retry", json={"members": ["nobody"]}).json()["code"] == "E_MIG_BAD_REQUEST"
    assert client.put(url, json=request).status_code == 409
    assert client.delete(url).status_code == 409
    with client.stream("GET", f"{WAVES}/stream", params={"wave_id": wave_id}, headers={"Last-Event-ID": "0"}) as stream:
        reported = []
        for line in stream.iter_lines():
            if line.startswith("data:"):
                reported.append(json.loads(line[5:]))
            if len(reported) == 3:
                break
    assert [one["state"] for one in reported] == ["draft", "running", "held"]
    entries, _ = service.store.audit.page(limit=50)
    assert f"/api/v1/waves/{wave_id}/approve" in {entry.resource for entry in entries}
    assert client.post(f"{url}/cancel").json()["state"] == "cancelled"


def test_jobs_of_a_wave_are_listed_and_its_report_is_safe_to_open(client: httpx.Client, service: Service) -> None:
    made = client.post(WAVES, json=body("a", "b")).json()
    job, other = (
        Migration(id=UUID(int=n), name="web", plan=PLAN, state=State.FAILED, mode_effective=Mode.COLD, created_at=now())
        for n in (1, 2)
    )
    service.store.add(job, host="local")
    service.store.add(other, host="local")
    member = service.waves.whole(UUID(made["id"])).members[0]
    fields = {"state": MemberState.FAILED, "job_id": job.id, "cause": "the disk is full"}
    assert change_members(service.store.waves, UUID(made["id"]), [member], {MemberState.WAITING}, fields) == ["a"]
    service.store.waves.put_reasons(UUID(made["id"]), {"b": 'It waits for "a".'})
    found = client.get("/migrations", params={"wave_id": made["id"]}).json()["items"]
    assert [one["id"] for one in found] == [str(job.id)]
    report = client.get(f"{WAVES}/{made['id']}/report", params={"format": "csv"})
    assert report.headers["content-type"].startswith("text/csv")
    lines = list(csv.DictReader(io.StringIO(report.text)))
    assert [(one["vm"], one["state"], one["cause"], one["waits_for"]) for one in lines] == [
        ("'=VM a", "failed", "the disk is full", ""),
        ("'=VM b", "waiting", "", 'It waits for "a".'),
    ]
    assert client.get(f"{WAVES}/{made['id']}").json()["members"][1]["waits_for"] == 'It waits for "a".'


def test_the_command_line_runs_a_wave(client: httpx.Client, service: Service, tmp_path: Path) -> None:
    file = tmp_path / "night.json"
    file.write_text(json.dumps(body("a", "b")))

    def run(*argv: str) -> str:
        done = CliRunner().invoke(app, ["waves", *argv, "--data-dir", str(service.settings.data_dir)])
        assert done.exit_code == 0, done.output
        return done.output

    assert "a draft with 2 members" in run("import", str(file))
    assert "night" in run("list")
    assert "waiting" in run("show", "night")
    assert json.loads(run("export", "night"))["name"] == "night"
    simulated = run("simulate", "night", "--more-destinations", "1")
    assert all(part in simulated for part in ("It ends", "p95", "The size of 2 members is not known", "MEMBER"))
    assert simulated.count("Bottleneck:") == 1
    assert "is running" in run("go", "night")
    assert "is held" in run("hold", "night")
    assert "skipped" in run("skip", "night", "a")
    assert "waiting" in run("members", "night")
    assert "skipped" in run("member", "night", "a")
    assert "is cancelled" in run("cancel", "night", "--yes")
    assert "'=VM a" in run("report", "night")
    wave_id = service.waves.page(limit=1, cursor=None)[0][0].id
    assert service.store.waves.get(wave_id).state == WaveState.CANCELLED
    assert "is removed" in run("remove", "night")


@pytest.mark.parametrize("wish", ["go", "hold", "cancel", "roll-back"])
def test_a_wave_that_is_not_there(client: httpx.Client, wish: str) -> None:
    assert client.post(f"{WAVES}/{UUID(int=5)}/{wish}").status_code == 404


def test_the_wave_of_the_guide_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "waves.md").read_text()
    block, what_if, hook = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    request = WaveRequest.model_validate_json(block, strict=True)
    check(request)
    assert [one.id for one in request.members] == ["db01", "web01"]
    assert WhatIf.model_validate_json(what_if, strict=True) != WhatIf()
    assert Hook.model_validate_json(hook).url == "https://ops.example/hooks/waves"


def test_a_wave_is_simulated_before_it_goes(client: httpx.Client, service: Service) -> None:
    made = client.post(WAVES, json=body("a", "b")).json()
    url = f"{WAVES}/{made['id']}"
    found = client.post(f"{url}/simulate").json()
    assert (found["assumed"], found["unfinished"]) == (["a", "b"], 0), "their source is not known here"
    assert client.get(url).json()["forecast"] == found["forecast"]
    assert found["forecast"]["ends_p50"] <= found["forecast"]["ends_p95"]
    planned = [one["planned_at"] for one in found["members"]]
    assert [one["planned_at"] for one in client.get(url).json()["members"]] == planned != [None, None]
    slower = client.post(f"{url}/simulate", json={"limits": {"wave": 1}}).json()
    assert "later" in slower["difference"]
    assert [one["planned_at"] for one in client.get(url).json()["members"]] == planned, "another number is only tried"
    report = client.get(f"{url}/report").json()
    assert report == client.get(f"{url}/report", params={"format": "json"}).json()
    assert [one["planned_at"] for one in report["members"]] == planned
    assert client.get(f"{url}/report", params={"format": "html"}).headers["content-type"].startswith("text/html")
    assert client.post(f"{url}/simulate", json={"more_destination": 1}).status_code == 400
    assert service.waves.whole(UUID(made["id"])).state == WaveState.DRAFT


@pytest.fixture
def listing(tmp_path: Path) -> Iterator[tuple[httpx.Client, FakePlatform, Service]]:
    """A service with a source that lists two VMs."""
    platform = FakePlatform(tmp_path / "platform")
    for name in ("shop-db-01", "shop-web-01"):
        platform.add_vm(name, {"disk-0": bytes(MIB)})
    service = Service(tmp_path / "service", has_pages=False, platforms=with_fake(platform))
    with service.served(), service.local() as client:
        added = client.post("/sources", json=SOURCE)
        assert added.status_code == 201, added.text
        yield client, platform, service
    service.close()


def sheet(client: httpx.Client, text: str, kind: str = "text/csv", **params: Any) -> httpx.Response:
    return client.post(f"{WAVES}/import", content=text.encode(), headers={"Content-Type": kind}, params=params)


def test_waves_are_made_of_a_sheet_all_of_them_or_none(
    listing: tuple[httpx.Client, FakePlatform, Service], tmp_path: Path
) -> None:
    client, platform, _ = listing
    good = "id,vm,wave,depends_on\ndb,shop-db-01,spring,\nweb,shop-web-01,,\n"
    tried = sheet(client, good, name="rest", dry_run=True).json()
    assert tried["waves"] == [{"id": None, "name": "spring", "members": 1}, {"id": None, "name": "rest", "members": 1}]
    wrong = sheet(client, good.replace("shop-web-01", "shop-web-1"))
    assert (wrong.status_code, wrong.json()["code"]) == (400, "E_MIG_BAD_REQUEST")
    assert "row 3, vm: no source has a VM 'shop-web-1' (did you mean shop-web-01?)" in wrong.json()["detail"]
    # A dependency on what is in another wave is no row's mistake, but the wave's.
    across = sheet(client, good.replace("web,shop-web-01,,", "web,shop-web-01,,db"), dry_run=True).json()
    assert [(one["row"], "wave imported: " in one["detail"]) for one in across["problems"]] == [(0, True)]
    assert client.get(WAVES).json()["items"] == [], "nothing was kept of any of them"

    made = sheet(client, good, name="rest").json()["waves"]
    assert [(one["name"], one["members"]) for one in made] == [("spring", 1), ("rest", 1)]
    member = client.get(f"{WAVES}/{made[0]['id']}").json()["members"][0]
    assert (member["plan"]["mode"], member["plan"]["source_ref"]["vm_id"]) == ("Warm", "shop-db-01")

    platform.fault("wrong_password", 1)
    silent = sheet(client, good, dry_run=True).json()["problems"]
    assert "the VMs of source" in silent[-1]["detail"]
    assert sheet(client, good, kind="text/plain").status_code == 415
    assert client.put(f"{WAVES}/import", json={}).status_code == 405, "import is no wave's id"


def test_a_wave_is_made_of_all_that_are_meant(listing: tuple[httpx.Client, FakePlatform, Service]) -> None:
    client, platform, service = listing
    source_id = client.get("/sources").json()["items"][0]["id"]
    query = {"source_id": source_id, "name": "spring", "vm": "SHOP-*", "power_state": "on", "outage_budget_s": 600}
    tried = client.post(f"{WAVES}/select", json=query, params={"dry_run": "true"})
    assert tried.json() == {"waves": [{"id": None, "name": "spring", "members": 2}], "left_out": [], "problems": []}
    none = client.post(f"{WAVES}/select", json=query | {"vm": "shop-db"})
    assert (none.status_code, none.json()["code"]) == (400, "E_MIG_BAD_REQUEST")
    assert "shop-db-01" in none.json()["hint"]
    assert client.get(WAVES).json()["items"] == []

    command = ["waves", "select", "spring", "--source", "fake", "--vm", "*web*", "--data-dir", str(service.settings.data_dir)]
    assert "would have 1 member" in CliRunner().invoke(app, [*command, "--dry-run"]).stdout
    done = CliRunner().invoke(app, [*command, "--outage-budget", "600", "--json"])
    assert done.exit_code == 0, done.output
    (made,) = json.loads(done.stdout)["waves"]
    (member,) = client.get(f"{WAVES}/{made['id']}").json()["members"]
    assert (member["id"], member["plan"]["mode"], member["outage_budget_s"]) == ("shop-web-01", "Warm", 600)

    platform.fault("wrong_password", 1)
    refused = client.post(f"{WAVES}/select", json=query)
    assert (refused.status_code, refused.json()["code"]) == (502, "E_MIG_AUTH_FAILED")
    assert client.post(f"{WAVES}/select", json=query | {"source_id": str(UUID(int=9))}).status_code == 404


def test_a_sheet_into_a_draft_keeps_its_windows_and_comes_out_again(
    listing: tuple[httpx.Client, FakePlatform, Service], tmp_path: Path
) -> None:
    client, _, service = listing
    window = {"id": "sat", "name": "sat", "start": "2030-01-01T00:00:00", "end": "2030-01-01T04:00:00"}
    draft = client.post(WAVES, json={"name": "night", "windows": [window]}).json()
    file = tmp_path / "night.csv"
    file.write_text("id,vm,window\ndb,shop-db-01,sat\nweb,shop-web-01,son\n")

    def run(*argv: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["waves", *argv, "--data-dir", str(service.settings.data_dir)])
        return done.exit_code, done.output

    code, output = run("import", str(file), "--into", "night", "--dry-run")
    assert (code, "son" in output) == (1, True), output
    file.write_text("id,vm,window\ndb,shop-db-01,sat\nweb,shop-web-01,\n")
    code, output = run("import", str(file), "--into", "night")
    assert (code, "a draft with 2 members" in output) == (0, True), output
    whole = client.get(f"{WAVES}/{draft['id']}").json()
    assert ([one["id"] for one in whole["members"]], whole["windows"][0]["id"]) == (["db", "web"], "sat")
    code, exported = run("export", "night", "--format", "csv")
    again = sheet(client, exported, into=draft["id"])
    assert (code, again.status_code) == (0, 200), again.text
    assert client.get(f"{WAVES}/{draft['id']}").json()["members"] == whole["members"]
    assert client.post(f"{WAVES}/{draft['id']}/go").status_code == 202
    assert sheet(client, exported, into=draft["id"]).status_code == 409


def test_a_sheet_of_a_wave_that_cannot_be_is_refused_and_leaves_a_draft_as_it_was(
    listing: tuple[httpx.Client, FakePlatform, Service],
) -> None:
    client, _, _ = listing
    document = json.dumps(json.loads(plan("vm-1").model_dump_json())).replace('"', '""')
    rows = "".join(f'm{number},x,g{number},"{document}"\n' for number in range(1001))
    draft = client.post(WAVES, json=body("a")).json()
    for into in ({}, {"into": draft["id"]}):
        refused = sheet(client, f"id,vm,app,plan\n{rows}", **into)
        assert (refused.status_code, refused.json()["code"]) == (400, "E_MIG_BAD_REQUEST"), refused.text
        assert "groups" in refused.json()["detail"]
    assert client.get(f"{WAVES}/{draft['id']}").json() == draft


def test_the_place_of_imports_is_no_wave(client: httpx.Client) -> None:
    for method in ("GET", "PUT", "DELETE", "OPTIONS"):
        refused = client.request(method, f"{WAVES}/import")
        assert (refused.status_code, refused.headers["Allow"]) == (405, "POST"), method


@with_the_page
def test_deliveries_are_listed_and_sent_again_and_nothing_secret_is_answered(client: httpx.Client, service: Service) -> None:
    hook = {"url": "https://user:hidden-1@ops.example:8443/hidden-2?hidden-3", "secret": "hidden-4" * 2}
    made = client.post(WAVES, json=body("a", hooks=[hook | {"required": True}])).json()
    (shown,) = made["hooks"]
    assert (shown["url"], shown["required"], "wave_began" in shown["events"]) == ("https://ops.example:8443", True, True)
    url = f"{WAVES}/{made['id']}"
    assert client.get(f"{url}/deliveries").json() == {"items": [], "next_cursor": None}
    client.post(f"{url}/go")
    (owed,) = client.get(f"{url}/deliveries", params={"state": "pending"}).json()["items"]
    assert (owed["event"], owed["hook_id"], owed["attempts"], owed["answer"]) == ("wave_began", shown["id"], 0, None)
    again = f"{url}/deliveries/{owed['number']}/again"
    assert client.post(again).status_code == 409
    service.store.wave_hooks.settle(owed["number"], state="given_up", answer="ops.example answers 404")
    runner = CliRunner()
    options = ["--data-dir", str(service.settings.data_dir)]
    listed = runner.invoke(app, ["waves", "deliveries", "night", *options])
    assert listed.exit_code == 0, listed.output
    assert "ops.example answers 404" in listed.output
    assert runner.invoke(app, ["waves", "deliver-again", "night", str(owed["number"]), *options]).exit_code == 0
    assert client.get(f"{url}/deliveries").json()["items"][0]["state"] == "pending"
    assert client.post(f"{url}/deliveries/99999/again").status_code == 404
    page = client.get(f"http://synvirt/waves/{made['id']}").text
    assert "https://ops.example:8443" in page
    assert "Wave began" in page
    everything = page + client.get(url).text + client.get(f"{url}/export").text + client.get(f"{url}/deliveries").text
    row = service.store.waves.get(UUID(made["id"]))
    assert not re.findall("hidden-[0-9]", everything + row.document)
