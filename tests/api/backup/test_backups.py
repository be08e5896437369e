"""/api/v1/backup and `synvirt backup`, on a real server; the guests are files."""

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from typer.testing import CliRunner, Result

from synvirt.cli import app
from tests.api.backup.conftest import served_guest
from tests.drawn import drawn
from tests.fakes.backups import ended
from tests.fakes.service import PASSWORD, USER, Service

SIZE = 3_000_001


def disk_content() -> bytes:
    return drawn(SIZE)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with served_guest(tmp_path, disk_content()) as made:
        yield made


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=str(service.settings.socket_path))
    with httpx.Client(transport=transport, base_url="http://synvirt/api/v1/backup", timeout=60) as made:
        yield made


def test_a_run_is_accepted_without_a_body_and_ends_completed(service: Service, client: httpx.Client, tmp_path: Path) -> None:
    body = {"name": "here", "kind": "local", "path": str(tmp_path / "repository")}
    made = client.post("/repositories", json=body)
    assert made.status_code == 201
    repository = made.json()
    assert made.headers["location"] == f"/api/v1/backup/repositories/{repository['id']}"
    assert (repository["encrypted"], repository["state"], repository["points_count"]) == (True, "ready", 0)
    job = client.post("/jobs", json={"name": "nightly", "vm_ids": ["web"], "repository_id": repository["id"]}).json()
    accepted = client.post(f"/jobs/{job['id']}/run")
    assert accepted.status_code == 202
    assert accepted.headers["location"] == f"/api/v1/backup/runs/{accepted.json()['id']}"
    ended(service.backups, accepted.json()["id"])
    run = client.get(f"/runs/{accepted.json()['id']}").json()
    assert run["status"] == "completed"
    assert (run["host"], run["attempt"]) == (service.settings.host_id, 1)
    (point,) = client.get("/restore-points").json()["items"]
    assert [point["id"]] == run["restore_point_ids"]
    assert (point["quiesced"], point["consistency"], point["repository_kind"]) == (False, "offline", "local")
    assert point["disks"] == [{"target": "vda", "size_bytes": SIZE}]
    assert client.get(f"/jobs/{job['id']}").json()["last_run_id"] == run["id"]
    for path in ("/repositories", "/jobs", "/runs"):
        page = client.get(path, params={"limit": 1}).json()
        assert (len(page["items"]), page["next_cursor"]) == (1, None)


@pytest.mark.parametrize("query", ["", "?volumes=keep", "?volumes=destroy"])
def test_an_ended_run_is_removed_also_as_the_last_one_of_its_job(
    service: Service, client: httpx.Client, tmp_path: Path, query: str
) -> None:
    body = {"name": "here", "kind": "local", "path": str(tmp_path / "repository")}
    repository = client.post("/repositories", json=body).json()
    asked = {"name": "nightly", "vm_ids": ["web"], "repository_id": repository["id"], "schedule": "0 2 * * *"}
    job = client.post("/jobs", json=asked).json()
    run = client.post(f"/jobs/{job['id']}/run").json()["id"]
    ended(service.backups, run)
    before = client.get(f"/jobs/{job['id']}").json()
    assert client.delete(f"/runs/{run}{query}").status_code == 204
    assert client.get(f"/runs/{run}").json()["code"] == "E_BAK_NOT_FOUND"
    assert client.get(f"/jobs/{job['id']}").json() == before | {"last_run_id": None}
    assert len(client.get("/restore-points").json()["items"]) == 1
    # The schedule goes on without it, and the job can be run.
    assert service.backups.run_due(datetime.fromisoformat(before["created_at"])) == []
    again = client.post(f"/jobs/{job['id']}/run").json()["id"]
    ended(service.backups, again)
    assert client.get(f"/jobs/{job['id']}").json()["last_run_id"] == again


def test_a_run_s_volumes_are_kept_or_destroyed_and_nothing_else(client: httpx.Client) -> None:
    refused = client.delete(f"/runs/{uuid4()}?volumes=all")
    assert (refused.status_code, refused.json()["code"]) == (400, "E_BAK_BAD_REQUEST")


def test_what_is_begun_has_a_place(service: Service, client: httpx.Client, tmp_path: Path) -> None:
    body = {"name": "here", "kind": "local", "path": str(tmp_path / "repository")}
    repository = client.post("/repositories", json=body).json()
    job = client.post("/jobs", json={"name": "nightly", "vm_ids": ["web"], "repository_id": repository["id"]}).json()
    ended(service.backups, client.post(f"/jobs/{job['id']}/run").json()["id"])
    (point,) = client.get("/restore-points").json()["items"]
    begun = (
        f"/restore-points/{point['id']}/verify",
        *(f"/repositories/{repository['id']}/{verb}" for verb in ("verify", "collect")),
    )
    for path in begun:
        accepted = client.post(path)
        assert accepted.headers["location"] == f"/api/v1/backup/runs/{accepted.json()['id']}", accepted.text
        ended(service.backups, accepted.json()["id"])
    accepted = client.post(f"/restore-points/{point['id']}/restore", json={"target": "export"})
    assert accepted.headers["location"] == f"/api/v1/backup/runs/{accepted.json()['id']}"
    ended(service.backups, accepted.json()["id"])


def test_what_is_wrong_is_a_problem(client: httpx.Client, tmp_path: Path) -> None:
    for method, path in [("GET", f"/jobs/{uuid4()}"), ("POST", f"/jobs/{uuid4()}/run"), ("GET", f"/restore-points/{uuid4()}")]:
        answer = client.request(method, path)
        assert (answer.status_code, answer.json()["code"]) == (404, "E_BAK_NOT_FOUND")
        assert answer.headers["content-type"] == "application/problem+json"
    answer = client.post("/repositories", json={"name": "x", "kind": "peer", "path": "/x"})
    assert answer.status_code == 400
    answer = client.post("/repositories", json={"name": "x", "kind": "local", "path": str(tmp_path / "nowhere")})
    assert (answer.status_code, answer.json()["code"]) == (502, "E_BAK_REPOSITORY_UNREACHABLE")
    answer = client.post("/repositories", json={"name": "x", "kind": "local", "path": str(tmp_path / "service")})
    assert (answer.status_code, answer.json()["code"]) == (409, "E_BAK_CONFLICT")


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "code"),
    [
        ("POST", "/jobs", {"json": {}}, 400, "E_BAK_BAD_REQUEST"),
        ("POST", "/jobs", {"json": {"plan": 1}}, 400, "E_BAK_BAD_REQUEST"),
        ("POST", "/jobs", {"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, "E_BAK_BAD_REQUEST"),
        ("POST", "/jobs", {"content": b"{}"}, 415, "E_BAK_BAD_REQUEST"),
        ("GET", "/jobs?limit=0", {}, 400, "E_BAK_BAD_REQUEST"),
        ("GET", "/runs?cursor=x", {}, 400, "E_BAK_BAD_REQUEST"),
        ("GET", "/jobs/none", {}, 404, "E_BAK_NOT_FOUND"),
        ("GET", "/nothing", {}, 404, "E_BAK_NOT_FOUND"),
        ("GET", "", {}, 404, "E_BAK_NOT_FOUND"),
        ("PUT", "/jobs", {}, 405, "E_BAK_BAD_REQUEST"),
    ],
)
def test_what_is_malformed_has_a_code_of_this_side(
    client: httpx.Client, method: str, path: str, sent: dict[str, Any], status: int, code: str
) -> None:
    answer = client.request(method, path, **sent)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"


def test_it_lies_behind_the_same_door(tmp_path: Path) -> None:
    service = Service(tmp_path / "service", tls=False)
    with service.served() as server, httpx.Client(base_url=server.address, timeout=60) as client:
        assert client.get("/api/v1/backup/restore-points").status_code == 401
        assert client.get("/api/v1/backup/restore-points", auth=(USER, PASSWORD)).json()["items"] == []
    service.close()


def test_it_is_in_the_document(client: httpx.Client) -> None:
    document = client.get("http://synvirt/openapi.json").json()
    operation = document["paths"]["/api/v1/backup/jobs/{job_id}/run"]["post"]
    assert operation["security"] == [{"basic": []}, {"token": []}]
    assert "requestBody" not in operation
    assert "E_BAK_CONFLICT" in operation["responses"]["409"]["description"]
    assert "BackupJobRequest" in document["components"]["schemas"]


def test_the_command_line_backs_up_verifies_and_restores(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synvirt(*argv: str) -> Result:
        return CliRunner().invoke(app, ["backup", *argv, "--data-dir", str(service.settings.data_dir)])

    def asked(*argv: str) -> dict[str, str]:
        done = synvirt(*argv, "--json")
        assert done.exit_code == 0, done.output
        answer: dict[str, str] = json.loads(done.output)
        return answer

    repository = asked("add-repository", str(tmp_path / "repository"), "--name", "here")
    key = synvirt("recovery-key", repository["id"]).output.strip()
    job = asked("add-job", "web", "--name", "nightly", "--repository", repository["id"], "--keep-last", "3")
    ran = synvirt("run", job["id"])
    assert ran.exit_code == 0, ran.output
    point = ran.output.split("restore point ")[1].split()[0]
    assert synvirt("verify", point).exit_code == 0
    assert synvirt("restore", point, "--name", "out").exit_code == 0
    assert [(tmp_path / "service/exports/out/0-vda.raw").read_bytes() == disk_content()] == [True]
    for listing in ("repositories", "jobs", "runs", "points"):
        assert synvirt(listing).exit_code == 0
    assert "web" in synvirt("points").output
    service.guests.remove("web")
    failed = synvirt("run", job["id"])
    assert failed.exit_code == 1
    assert "E_BAK_NOT_FOUND" in failed.output
    monkeypatch.setitem(os.environ, "SYNVIRT_RECOVERY_KEY", key)
    again = synvirt("add-repository", str(tmp_path / "repository"), "--name", "again", "--existing")
    assert (again.exit_code, "E_BAK_CONFLICT" in again.output) == (1, True)
    assert synvirt("remove-point", point).exit_code == 0
    assert "There are no restore points" in synvirt("points").output
