"""The lists of runs and restore points are narrowed by the database: what is asked for may be far down a long list."""

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from typer.testing import CliRunner

from synvirt.backups.model import BackupJob, BackupRun, RestorePoint, Status
from synvirt.backups.retention import Retention
from synvirt.cli import app
from synvirt.model.values import now
from tests.fakes.service import Service

NIGHTLY, WEEKLY, HERE, NAS = (uuid4() for _ in range(4))
ODD = 'a "%_!" \\ \N{SNOWMAN}'


@pytest.fixture(params=["sqlite", "postgresql"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    shared = {"database_url": request.getfixturevalue("postgresql_url")} if request.param == "postgresql" else {}
    made = Service(tmp_path / "data", has_pages=False, host_id="local", **shared)
    for job_id, name in ((NIGHTLY, "nightly"), (WEEKLY, "weekly")):
        job = BackupJob(
            id=job_id, name=name, vm_ids=("web",), repository_id=HERE, quiesce="try", retention=Retention(), created_at=now()
        )
        made.store.backups.put("job", job_id, job, host="local")
    with made.served():
        yield made
    made.close()


def _run(service: Service, **fields: object) -> str:
    run = BackupRun.model_validate({"id": uuid4(), "created_at": now()} | fields)
    service.store.backups.put("run", run.id, run, host="local", state=str(run.status))
    return str(run.id)


def _point(service: Service, vm_name: str, job_id: UUID = NIGHTLY, repository_id: UUID = HERE, state: str = "ok") -> str:
    fields = {"vm_id": f"id-of-{vm_name}", "run_id": uuid4(), "quiesced": False, "consistency": "crash", "disks": ()}
    known = {"repository_kind": "local", "size_bytes": 1, "stored_bytes": 1, "created_at": now(), "id": uuid4()}
    of = {"vm_name": vm_name, "job_id": job_id, "repository_id": repository_id, "state": state}
    point = RestorePoint.model_validate(fields | known | of)
    service.backups.points.put(point)
    return str(point.id)


def _found(service: Service, path: str, **parameters: object) -> list[str]:
    with service.local() as client:
        answer = client.get(f"http://synvirt/api/v1/backup{path}", params=parameters)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["items"]]


def test_the_list_of_runs_is_narrowed_by_status_kind_and_job(service: Service) -> None:
    old = _run(service, job_id=WEEKLY, status=Status.FAILED)
    verified = _run(service, kind="verify", status=Status.COMPLETED)
    new = _run(service, job_id=NIGHTLY, status=Status.COMPLETED)
    assert _found(service, "/runs") == [new, verified, old]
    assert _found(service, "/runs", status="failed") == _found(service, "/runs", job_id=str(WEEKLY), limit=1) == [old]
    assert _found(service, "/runs", status=["failed", "completed"], kind="backup") == [new, old]
    assert _found(service, "/runs", kind=["verify", "restore"]) == [verified]
    assert _found(service, "/runs", kind="restore") == _found(service, "/runs", job_id=str(HERE)) == []


def test_the_list_of_restore_points_is_narrowed_by_all_that_a_point_is_of(service: Service) -> None:
    web, upper, odd = _point(service, "web"), _point(service, "WEB", WEEKLY), _point(service, ODD, NIGHTLY, NAS, "damaged")
    # A guest with a hostile name is none of those that the name speaks of.
    forged = _point(service, f'","vm_name":"web","job_id":"{WEEKLY}",')
    assert _found(service, "/restore-points") == [forged, odd, upper, web]
    assert _found(service, "/restore-points", vm_name="web") == _found(service, "/restore-points", vm_id="id-of-web") == [web]
    assert _found(service, "/restore-points", vm_name=ODD) == _found(service, "/restore-points", state="damaged") == [odd]
    assert _found(service, "/restore-points", job_id=str(WEEKLY)) == [upper]
    assert _found(service, "/restore-points", repository_id=str(NAS), state=["ok", "unverified"]) == []
    assert _found(service, "/restore-points", vm_name="we") == _found(service, "/restore-points", vm_name="%") == []


def test_the_pages_of_a_narrowed_list_are_full(service: Service) -> None:
    mine = [_point(service, "web", (NIGHTLY, WEEKLY)[at % 2]) for at in range(8)][::2]
    with service.local() as client:
        asked: dict[str, str | int] = {"job_id": str(NIGHTLY), "limit": 3}
        page = client.get("http://synvirt/api/v1/backup/restore-points", params=asked).json()
        rest = client.get("http://synvirt/api/v1/backup/restore-points", params=asked | {"cursor": page["next_cursor"]}).json()
    assert [[one["id"] for one in each["items"]] for each in (page, rest)] == [mine[:0:-1], mine[:1]]
    assert rest["next_cursor"] is None


def test_a_wrong_word_is_refused(service: Service) -> None:
    with service.local() as client:
        for asked in ("runs?status=faild", "runs?kind=x", "restore-points?state=fine", "restore-points?vm_name=a%00b"):
            answer = client.get(f"http://synvirt/api/v1/backup/{asked}")
            assert (answer.status_code, answer.json()["code"]) == (400, "E_BAK_BAD_REQUEST")


def test_the_command_line_takes_a_job_by_its_name(service: Service) -> None:
    web, other = _point(service, "web"), _point(service, "web", WEEKLY)
    failed = _run(service, job_id=WEEKLY, status=Status.FAILED)
    at_home = ["--data-dir", str(service.settings.data_dir)]
    points = CliRunner().invoke(app, ["backup", "points", "--vm-name", "web", "--job", "nightly", *at_home]).output
    assert (web in points, other in points) == (True, False)
    runs = CliRunner().invoke(app, ["backup", "runs", "--status", "failed", "--job", "weekly", *at_home]).output
    assert failed in runs
    assert CliRunner().invoke(app, ["backup", "runs", "--job", "yearly", *at_home]).exit_code == 1
