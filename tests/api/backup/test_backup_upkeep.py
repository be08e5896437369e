"""What is asked of jobs, points and repositories beyond runs: schedules, retention, protection, verification, garbage."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.backups import ended
from tests.fakes.service import Service


class Host:
    """A service with a repository, a job and its guest, and a client of /backup."""

    def __init__(self, service: Service, folder: Path, client: httpx.Client) -> None:
        self.service, self.client, self.folder = service, client, folder / "repository"
        self.folder.mkdir()
        body: dict[str, Any] = {"name": "here", "kind": "local", "path": str(self.folder)}
        self.repository = self.asked("POST", "/repositories", 201, json=body)["id"]
        service.guests.image("web", b"first")
        body = {"name": "nightly", "vm_ids": ["web"], "repository_id": self.repository, "retention": {"keep_last": 2}}
        self.job = self.asked("POST", "/jobs", 201, json=body)["id"]

    def asked(self, method: str, path: str, status: int = 200, **sent: Any) -> Any:
        answer = self.client.request(method, path, **sent)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def ended(self, method: str, path: str) -> Any:
        run = self.asked(method, path, 202)
        ended(self.service.backups, run["id"])
        return self.asked("GET", f"/runs/{run['id']}")

    def backed_up(self, content: bytes) -> str:
        self.service.guests.image("web", content)
        run = self.ended("POST", f"/jobs/{self.job}/run")
        assert run["status"] == "completed", run
        point: str = run["restore_point_ids"][0]
        return point


@pytest.fixture
def host(service: Service, tmp_path: Path) -> Iterator[Host]:
    transport = httpx.HTTPTransport(uds=str(service.settings.socket_path))
    with httpx.Client(transport=transport, base_url="http://synvirt/api/v1/backup", timeout=60) as client:
        yield Host(service, tmp_path, client)


def test_a_job_is_changed_in_what_was_sent_alone(host: Host) -> None:
    was = host.asked("GET", f"/jobs/{host.job}")
    assert (was["schedule"], was["next_run_at"]) == (None, None)
    changed = host.asked("PATCH", f"/jobs/{host.job}", json={"schedule": "0 2 * * *", "name": "each night"})
    assert changed["next_run_at"].endswith("T02:00:00.000Z")
    same = ("vm_ids", "retention", "quiesce", "repository_id", "created_at")
    assert {name: changed[name] for name in same} == {name: was[name] for name in same}
    assert host.asked("GET", f"/jobs/{host.job}") == changed
    assert host.asked("PATCH", f"/jobs/{host.job}", json={"schedule": None})["next_run_at"] is None
    wrongs: list[dict[str, Any]] = [
        {"schedule": "at night"},
        {"name": ""},
        {"vm_ids": []},
        {"repository_id": host.repository},
        {"retention": None},
    ]
    for wrong in wrongs:
        assert host.asked("PATCH", f"/jobs/{host.job}", 400, json=wrong)["code"] == "E_BAK_BAD_REQUEST"


def test_retention_is_shown_before_it_is_done(host: Host) -> None:
    points = [host.backed_up(bytes([number]) * 100) for number in range(2)]
    shown = host.asked("GET", f"/jobs/{host.job}/retention")["items"]
    assert [(one["restore_point_id"], one["kept_by"], one["removed"]) for one in shown] == [
        (points[1], ["keep_last"], False),
        (points[0], ["keep_last"], False),
    ]
    other = host.asked("GET", f"/jobs/{host.job}/retention", params={"keep_last": 1})["items"]
    assert [(one["restore_point_id"], one["kept_by"], one["removed"]) for one in other][1] == (points[0], [], True)
    for wrong in ({"keep_last": -1}, {"keep_last": "x"}, {"keep_none": 1}):
        assert host.asked("GET", f"/jobs/{host.job}/retention", 400, params=wrong)["code"] == "E_BAK_BAD_REQUEST"
    assert len(host.asked("GET", "/restore-points")["items"]) == 2, "to look is not to remove"
    host.asked("PATCH", f"/jobs/{host.job}", json={"retention": {"keep_last": 1}})
    host.asked("POST", f"/jobs/{host.job}/retention")
    assert [one["id"] for one in host.asked("GET", "/restore-points")["items"]] == [points[1]]


def test_a_protected_point_outlives_retention_and_removal(host: Host) -> None:
    first = host.backed_up(b"1")
    assert host.asked("PATCH", f"/restore-points/{first}", json={"protected": True})["protected"]
    assert host.asked("DELETE", f"/restore-points/{first}", 409)["code"] == "E_BAK_CONFLICT"
    others = [host.backed_up(bytes([number])) for number in range(3)]
    assert [one["id"] for one in host.asked("GET", "/restore-points")["items"]] == [others[2], others[1], first]
    kept = host.asked("GET", f"/jobs/{host.job}/retention")["items"]
    assert kept[-1]["kept_by"] == ["protected"]
    assert not host.asked("PATCH", f"/restore-points/{first}", json={"protected": False})["protected"]
    host.backed_up(b"last")
    assert first not in [one["id"] for one in host.asked("GET", "/restore-points")["items"]]
    assert host.asked("PATCH", f"/restore-points/{first}", 404, json={"protected": True})["code"] == "E_BAK_NOT_FOUND"


def test_protection_is_found_where_the_repository_is_used_again(host: Host) -> None:
    point = host.backed_up(b"1")
    host.asked("PATCH", f"/restore-points/{point}", json={"protected": True})
    key = host.asked("GET", f"/repositories/{host.repository}/recovery-key")["recovery_key"]
    host.asked("DELETE", f"/jobs/{host.job}", 204)
    host.asked("DELETE", f"/repositories/{host.repository}", 204)
    body = {"name": "again", "kind": "local", "path": str(host.folder), "recovery_key": key}
    host.asked("POST", "/repositories", 201, json=body)
    assert host.asked("GET", f"/restore-points/{point}")["protected"]


def test_a_whole_repository_is_verified_and_its_damage_is_reported(host: Host) -> None:
    points = [host.backed_up(b"1"), host.backed_up(b"2")]
    run = host.ended("POST", f"/repositories/{host.repository}/verify")
    assert (run["kind"], run["status"], run["repository_id"]) == ("verify", "completed", host.repository)
    assert (run["report"]["points"], run["report"]["wrongs"]) == (2, [])
    assert {one["state"] for one in host.asked("GET", "/restore-points")["items"]} == {"ok"}
    for manifest in (host.folder / "manifests").glob(f"{points[0]}*"):
        manifest.unlink()
    for pack in (host.folder / "packs").iterdir():
        content = bytearray(pack.read_bytes())
        content[len(content) // 2] ^= 1
        pack.write_bytes(content)
    run = host.ended("POST", f"/repositories/{host.repository}/verify")
    assert (run["status"], run["error"]["code"]) == ("failed", "E_BAK_DAMAGED")
    assert run["report"]["wrongs"]
    assert host.asked("GET", f"/restore-points/{points[0]}")["state"] == "damaged", "it is no more there"


def test_garbage_is_counted_without_being_touched(host: Host) -> None:
    point = host.backed_up(b"1" * 5000)
    host.asked("DELETE", f"/restore-points/{point}", 204)
    before = sorted(path.name for path in host.folder.rglob("*"))
    for query in ("?dry_run=true", ""):
        run = host.ended("POST", f"/repositories/{host.repository}/collect{query}")
        assert (run["kind"], run["status"]) == ("collect", "completed")
        assert run["collected"]["packs_deleted"] == 0, "it is young: a run may be about to need it"
    assert sorted(path.name for path in host.folder.rglob("*")) == before
    assert host.asked("POST", f"/repositories/{host.job}/collect", 404)["code"] == "E_BAK_NOT_FOUND"
