"""DELETE /migrations/:id, `synvirt migrations remove` and the page, on a real server."""

import httpx
from typer.testing import CliRunner

from synvirt.cli import app
from synvirt.model.job import DiskProgress, Migration, Pass, StateVisit
from synvirt.model.kinds import State
from synvirt.model.problems import Problem
from synvirt.model.values import now
from tests.api.conftest import with_the_page
from tests.fakes.service import Service
from tests.jobs.migrations import migration


def _visits(*states: State) -> tuple[StateVisit, ...]:
    return tuple(StateVisit(state=state, at=now()) for state in (State.QUEUED, *states))


def _failed(service: Service) -> Migration:
    error = Problem(code="E_MIG_GUEST_BOOT_FAILED", message="no boot", hint=None, fatal=True, at=now(), state=State.STARTING)
    disks = (DiskProgress(key="a", label="a", volume="v-1"),)
    job = migration(state=State.FAILED, last_error=error, disks=disks, finished_at=now(), history=_visits(State.FAILED))
    service.store.add(job, host="local")
    return job


def test_a_failed_job_goes_with_its_volumes(client: httpx.Client, service: Service) -> None:
    job = _failed(service)
    answer = client.delete(f"/migrations/{job.id}")
    assert (answer.status_code, answer.json()["code"]) == (409, "E_MIG_CONFLICT")
    assert "keep or destroy" in answer.json()["hint"]
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


@with_the_page
def test_the_page_offers_what_may_go_and_removes_it(client: httpx.Client, service: Service) -> None:
    kept, plain = _failed(service), migration(state=State.COMPLETED, finished_at=now(), history=_visits(State.COMPLETED))
    service.store.add(plain, host="local")
    service.store.add(running := migration(history=_visits()), host="local")
    transport = httpx.HTTPTransport(uds=str(service.settings.socket_path))
    with httpx.Client(transport=transport, base_url="http://synvirt", timeout=60) as page:
        offered = {
            job.id: {
                name
                for name in ("remove", "destroy")
                if f"/migrations/{job.id}/{name}" in page.get(f"/migrations/{job.id}").text
            }
            for job in (kept, plain, running)
        }
        assert offered == {kept.id: {"remove", "destroy"}, plain.id: {"remove"}, running.id: set()}
        assert "its copy no longer exists" in page.get(f"/migrations/{kept.id}/destroy").text
        assert page.post(f"/migrations/{kept.id}/destroy").headers["Location"] == "/"
        assert service.destroyed == ["v-1"]
        assert page.post(f"/migrations/{plain.id}/remove").status_code == 303
        assert page.post(f"/migrations/{running.id}/remove").status_code == 409
    found = [client.get(f"/migrations/{job.id}").status_code for job in (kept, plain, running)]
    assert found == [404, 404, 200]


@with_the_page
def test_the_page_says_which_pass_took_whole_disks(service: Service, client: httpx.Client) -> None:
    passes = tuple(Pass(number=number, kind="delta", bytes=1, seconds=1, whole=number == 2) for number in (1, 2))
    service.store.add(job := migration(passes=passes, history=_visits()), host="local")
    transport = httpx.HTTPTransport(uds=str(service.settings.socket_path))
    with httpx.Client(transport=transport, base_url="http://synvirt", timeout=60) as page:
        rows = page.get(f"/migrations/{job.id}").text.split('<th scope="row">')
    assert ["whole disks compared" in row for row in rows if "<td>delta" in row] == [False, True]
