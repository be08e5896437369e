"""DELETE /migrations/:id, `synvirt migrations remove` and the page, on a real server."""

import httpx
from typer.testing import CliRunner

from synvirt.cli import app
from synvirt.model import DiskProgress, Migration, Problem, State, now
from tests.fakes.service import Service
from tests.jobs.migrations import migration


def _failed(service: Service) -> Migration:
    error = Problem(code="E_MIG_GUEST_BOOT_FAILED", message="no boot", hint=None, fatal=True, at=now(), state=State.STARTING)
    disks = (DiskProgress(key="a", label="a", volume="v-1"),)
    job = migration(state=State.FAILED, last_error=error, disks=disks, finished_at=now())
    service.store.add(job, host="local")
    return job


def test_a_failed_job_goes_with_its_volumes(client: httpx.Client, service: Service) -> None:
    job = _failed(service)
    asked = client.delete(f"/migrations/{job.id}")
    assert (asked.status_code, asked.json()["code"]) == (409, "E_MIG_CONFLICT")
    assert "keep or destroy" in asked.json()["hint"]
    assert client.delete(f"/migrations/{job.id}", params={"volumes": "all"}).status_code == 400
    assert client.delete(f"/migrations/{job.id}", params={"volumes": "destroy"}).status_code == 204
    assert service.destroyed == ["v-1"]
    assert client.get(f"/migrations/{job.id}").status_code == 404
    assert client.delete(f"/migrations/{job.id}").status_code == 404


def test_a_job_that_runs_stays(client: httpx.Client, service: Service) -> None:
    service.store.add(job := migration(), host="local")
    answer = client.delete(f"/migrations/{job.id}")
    assert (answer.status_code, answer.json()["code"]) == (409, "E_MIG_CONFLICT")


def test_the_command_line_removes_one(client: httpx.Client, service: Service) -> None:
    job = _failed(service)
    argv = ["migrations", "remove", str(job.id), "--data-dir", str(service.settings.data_dir)]
    assert CliRunner().invoke(app, argv).exit_code == 1
    assert CliRunner().invoke(app, [*argv, "--volumes", "keep"]).exit_code == 0
    assert service.destroyed == []
    assert service.store.documents(limit=9) == ([], None)
