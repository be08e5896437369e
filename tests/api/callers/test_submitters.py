"""Every document of a job says who submitted it: account, role and address. Its answers, its pages, the command line."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from typer.testing import CliRunner

from synvirt.api.callers.auth import Throttled
from synvirt.backups.model import BackupJobRequest, BackupRepositoryRequest, BackupRun
from synvirt.cli.backup.runs import sheet as run_sheet
from synvirt.cli.rehearsals import _sheet as rehearsal_sheet
from synvirt.fleet.model import WaveRequest
from synvirt.main import app
from synvirt.migrations.proof.receipts import facts_of
from synvirt.model.job import Migration, Progress
from synvirt.model.kinds import State
from synvirt.model.submitter import submitter_in
from synvirt.sizes import MIB
from synvirt.store.tables import migrations
from tests.fakes.service import PLAN, Service, every_role
from tests.house import live_plan

API = "/api/v1"
WHO = {"account": "operator", "role": "operator", "address": "127.0.0.1"}
ACCOUNT_ALONE = {"account": "Joe", "role": None, "address": None}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, httpx.Client]]:
    folder = tmp_path_factory.mktemp("service")
    accounts = every_role(folder / "users", "pw")
    service = Service(folder, check_password=Throttled(accounts), role_of=accounts.role_of, tls=False)
    with (
        service.served() as server,
        httpx.Client(base_url=server.address, timeout=60, auth=("operator", "pw")) as client,
    ):
        yield service, client
    service.close()


def _json(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    answer = client.request(method, f"{API}{path}", json=body)
    assert answer.is_success, answer.text
    return answer.json()


def _streamed(client: httpx.Client, path: str, event: str) -> Any:
    """The data of the stream's first event of this name."""
    with client.stream("GET", f"{API}{path}") as answer:
        lines = answer.iter_lines()
        for line in lines:
            if line == f"event: {event}":
                data = next(one for one in lines if one.startswith("data:"))
                return json.loads(data.removeprefix("data:"))
    raise AssertionError(f"no {event} in {path}")


def _plan(plan: Any) -> Any:
    return {"plan": plan.model_dump(mode="json", exclude_none=True)}


def test_a_migration(served: tuple[Service, httpx.Client]) -> None:
    service, client = served
    path = "/migrator/migrations"
    made = _json(client, "POST", path, _plan(PLAN))
    one = f"{path}/{made['id']}"
    answers = [made, _json(client, "GET", one), _streamed(client, f"{path}/stream?migration_id={made['id']}", "migration")]
    answers += [job for job in _json(client, "GET", path)["items"] if job["id"] == made["id"]]
    answers.append(_json(client, "POST", f"{one}/cancel"))
    assert [(answer["id"], answer["submitted_by"]) for answer in answers] == [(made["id"], WHO)] * 5
    assert not any("submitter" in answer for answer in answers)
    page = client.get(f"/migrations/{made['id']}").text
    assert "by operator (operator, 127.0.0.1)" in page
    sheet = CliRunner().invoke(app, ["--data-dir", str(service.settings.data_dir), "migrations", "show", made["id"]]).output
    assert "operator (operator, 127.0.0.1)" in sheet
    assert facts_of(service.store.get(UUID(made["id"])))["job"]["submitted_by"] == WHO
    assert service.intake.submit(live_plan()).submitted_by is None, "the service itself"


def test_a_migration_by_the_unix_socket_and_one_that_is_retried(served: tuple[Service, httpx.Client]) -> None:
    service, client = served
    at_home = ["--data-dir", str(service.settings.data_dir)]
    job = service.submit(live_plan(name="retried"))
    service.move(job.id, State.FAILED)
    retried = _json(client, "POST", f"/migrator/migrations/{job.id}/retry")
    assert retried["submitted_by"] == WHO, "who retries it"
    service.move(UUID(retried["id"]), State.FAILED)
    done = CliRunner().invoke(app, [*at_home, "migrations", "retry", retried["id"], "--json"])
    assert json.loads(done.output)["submitted_by"] == {"account": "local", "role": "admin", "address": ""}


def test_a_running_job_that_the_version_before_has_written_again(served: tuple[Service, httpx.Client]) -> None:
    """It puts what it does not know before the rest, and lists look for running jobs by the beginning."""
    service, client = served
    made = UUID(_json(client, "POST", "/migrator/migrations", _plan(PLAN.model_copy(update={"name": "again"})))["id"])
    service.move(made, State.COPYING_FULL)
    with service.store._writing() as db:
        (text,) = db.execute(migrations.select().where(migrations.c.id == str(made)).with_only_columns(migrations.c.document))
        document = json.loads(text[0])
        moved = {"submitter": document.pop("submitter"), **document}
        written = json.dumps(moved, separators=(",", ":"))
        db.execute(migrations.update().where(migrations.c.id == str(made)).values(document=written))
    service.board.pin(made, State.COPYING_FULL, Progress(bytes_total=99, bytes_done=77))
    (found,) = (job for job in _json(client, "GET", "/migrator/migrations")["items"] if job["id"] == str(made))
    assert (found["submitted_by"], found["progress"]["bytes_done"]) == (WHO, 77)


def test_a_job_that_the_version_before_has_made(served: tuple[Service, httpx.Client]) -> None:
    service, client = served
    job = service.submit(live_plan(name="older"))
    with service.store._writing() as db:
        text = job.model_dump_json().replace('"submitted_by":null', '"submitted_by":"Joe"')
        db.execute(migrations.update().where(migrations.c.id == str(job.id)).values(document=text, version="1.1"))
    path = "/migrator/migrations"
    answers = [one for one in _json(client, "GET", path)["items"] if one["id"] == str(job.id)]
    answers.append(_json(client, "GET", f"{path}/{job.id}"))
    answers.append(_streamed(client, f"{path}/stream?migration_id={job.id}", "migration"))
    assert [one["submitted_by"] for one in answers] == [ACCOUNT_ALONE] * 3
    assert "by Joe<" in client.get(f"/migrations/{job.id}").text


def test_a_backup_run(served: tuple[Service, httpx.Client]) -> None:
    service, client = served
    service.guests.image("web", bytes(MIB))
    folder = service.settings.data_dir / "repository"  # the run goes on after this test
    folder.mkdir()
    repository = service.backups.add_repository(BackupRepositoryRequest(name="r", kind="local", path=str(folder)))
    job = service.backups.add_job(BackupJobRequest(name="j", vm_ids=("web",), repository_id=repository.id))
    made = _json(client, "POST", f"/backup/jobs/{job.id}/run")
    answers = [made, _json(client, "GET", f"/backup/runs/{made['id']}")]
    answers += [_streamed(client, f"/backup/runs/stream?run_id={made['id']}", "run")]
    answers += [run for run in _json(client, "GET", "/backup/runs")["items"] if run["id"] == made["id"]]
    answers.append(_json(client, "POST", f"/backup/repositories/{repository.id}/verify"))
    assert [answer["submitted_by"] for answer in answers] == [WHO] * 5
    assert not any("submitter" in answer for answer in answers)
    assert "by operator (operator, 127.0.0.1)" in client.get(f"/backups/runs/{made['id']}").text


def test_a_rehearsal(served: tuple[Service, httpx.Client]) -> None:
    service, client = served
    job = service.submit(live_plan(name="rehearsed", warm={"cutover": "manual"}))
    service.move(job.id, State.COPYING_FULL)
    service.move(job.id, State.DELTA_SYNCING)
    path = f"/migrator/migrations/{job.id}"
    made = _json(client, "POST", f"{path}/rehearsals")
    answers = [made, *_json(client, "GET", f"{path}/rehearsals")["items"]]
    answers.append(_json(client, "GET", f"{path}/rehearsals/{made['id']}"))
    assert [answer["submitted_by"] for answer in answers] == [WHO] * 3
    assert "by operator (operator, 127.0.0.1)" in client.get(f"/migrations/{job.id}/proof").text
    at_home = ["--data-dir", str(service.settings.data_dir)]
    sheet = CliRunner().invoke(app, [*at_home, "rehearsals", "show", str(job.id), made["id"]]).output
    assert "asked by operator (operator, 127.0.0.1)" in sheet


def test_a_wave_and_what_it_carries(served: tuple[Service, httpx.Client]) -> None:
    service, client = served
    member = {"id": "a", "vm": "a", "plan": live_plan().model_dump(mode="json", exclude_none=True)}
    asked = WaveRequest.model_validate({"name": "night", "members": [member]})
    made = _json(client, "POST", "/waves", asked.model_dump(mode="json", exclude_none=True))
    answers = [made, _json(client, "GET", f"/waves/{made['id']}"), *_json(client, "GET", "/waves")["items"]]
    answers.append(_json(client, "PUT", f"/waves/{made['id']}", asked.model_dump(mode="json", exclude_none=True)))
    answers.append(_json(client, "POST", f"/waves/{made['id']}/go"))
    assert [answer["submitted_by"] for answer in answers] == [WHO] * 5
    assert "by operator (operator, 127.0.0.1)" in client.get(f"/waves/{made['id']}").text
    at_home = ["--data-dir", str(service.settings.data_dir)]
    assert "by operator (operator, 127.0.0.1)" in CliRunner().invoke(app, [*at_home, "waves", "show", "night"]).output
    wave = service.waves.whole(UUID(made["id"]))
    assert service.intake.submit(live_plan(name="carried"), submitted_by=wave.submitted_by).submitted_by == wave.submitted_by
    held = _json(client, "POST", f"/waves/{made['id']}/hold")
    assert held["reason"] == "It was held by operator."


def test_the_command_line_reads_an_earlier_versions_answers(capsys: pytest.CaptureFixture[str]) -> None:
    job = json.loads(Migration.model_validate_json(_MIGRATION).model_dump_json()) | {"submitted_by": "Joe"}
    assert str(Migration.model_validate_json(json.dumps(job)).submitted_by) == "Joe"
    run = {"id": str(uuid4()), "submitted_by": "Joe", "created_at": "2026-01-02T03:04:05Z"}
    run_sheet(BackupRun.model_validate_json(json.dumps(run)))
    rehearsal_sheet({"state": "Passed", "moment": None, "checks": [], "sameness": [], "submitted_by": "Joe"} | _NO_FIGURES)
    assert capsys.readouterr().out.count("asked by") == 2
    assert submitter_in({"submitted_by": None}) is None


_NO_FIGURES = {"conversion_s": None, "boot_s": None, "outage_s": None, "error": None, "screenshot_url": None}
_MIGRATION = json.dumps(
    {
        "id": str(uuid4()),
        "name": "web",
        "plan": PLAN.model_dump(mode="json"),
        "mode_effective": "Cold",
        "created_at": "2026-01-02T03:04:05Z",
    }
)
