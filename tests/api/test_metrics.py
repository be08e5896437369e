"""/metrics: what it says of jobs, bytes and answers; who may read it; and that it stays small."""

import re
from collections.abc import Iterator
from datetime import timedelta
from operator import methodcaller
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event, update

from synvirt.api.metrics import CODES, METHODS, Metrics
from synvirt.fleet.changing import change_members
from synvirt.fleet.model import MemberState as S
from synvirt.fleet.waves import Waves
from synvirt.jobs.board import Board
from synvirt.model.job import OutageForecast, Progress
from synvirt.model.kinds import OfflineKind, State
from synvirt.model.plan import PlanSource
from synvirt.model.problems import Problem
from synvirt.model.values import now
from synvirt.store import Store
from synvirt.store.tables import migrations
from tests.fakes.service import PASSWORD, PLAN, USER, Service, failed
from tests.fleet.made import member, wave

MIB = 1 << 20


@pytest.fixture
def metrics(service: Service) -> Metrics:
    return Metrics(service.store, service.board, host="local", jobs_at_once=4)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    text, _ = metrics.text("")
    return samples(text.decode()).get((name, frozenset(labels.items())))


def copied(service: Service, job_id: object, count: int) -> None:
    progress = Progress(bytes_done=count, bytes_total=count)
    job = service.store.get(job_id)  # type: ignore[arg-type]
    service.store.change(job.id, job.state, lambda job: job.model_copy(update={"progress": progress}))


# ── over the wire ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_users_of_the_unix_socket_may_read_it(client: httpx.Client) -> None:
    assert client.get("http://synvirt/metrics").status_code == 200


def test_strangers_are_asked_who_they_are(tmp_path: Path) -> None:
    service = Service(tmp_path)
    with service.served() as server, httpx.Client(base_url=server.address, verify=False, timeout=60) as stranger:
        assert stranger.get("/metrics").status_code == 401
        answer = stranger.get("/metrics", auth=(USER, PASSWORD))
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert 'synvirt_jobs{state="Queued"} 0.0' in answer.text
    service.close()


def test_openmetrics_is_sent_on_request(client: httpx.Client) -> None:
    answer = client.get("http://synvirt/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_answers_are_reported_by_route_never_by_path(service: Service, client: httpx.Client) -> None:
    for _ in range(3):
        job = service.submit()
        assert client.get(f"/migrations/{job.id}").status_code == 200
    client.get("/no/such/path/4711")
    client.request("BREW", "/migrations")
    reported = samples(client.get("http://synvirt/metrics").text)
    counts = {
        dict(labels)["route"]: count for (name, labels), count in reported.items() if name.endswith("answer_seconds_count")
    }
    assert counts["/api/v1/migrator/migrations/{migration_id}"] == 3
    assert counts["other"] >= 1
    assert not any("4711" in str(key) or "BREW" in str(key) or str(job.id) in str(key) for key in reported)
    methods = {dict(labels).get("method") for _, labels in reported}
    assert methods - {None, "other"} <= METHODS


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_jobs_are_counted_by_state_each_state_always(service: Service, metrics: Metrics) -> None:
    assert [value(metrics, "synvirt_jobs", state=str(state)) for state in State] == [0] * len(State)
    first, _ = service.submit(), service.submit()
    service.move(first.id, State.COPYING_FULL)
    assert value(metrics, "synvirt_jobs", state="Queued") == 1
    assert value(metrics, "synvirt_jobs", state="CopyingFull") == 1
    assert (value(metrics, "synvirt_queue_oldest_seconds") or 0) > 0
    assert value(metrics, "synvirt_jobs_at_once") == 4


def test_bytes_are_counted_once_by_any_process(service: Service, metrics: Metrics) -> None:
    """The board is ahead of the document; a pass that went back to its watermark does not count its bytes again."""
    way = {"source": "ova_archive", "destination": "default"}
    job = service.submit()
    service.move(job.id, State.COPYING_FULL)
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_done=10 * MIB, rate_bps=MIB))
    assert value(metrics, "synvirt_copied_bytes_total", **way) == 10 * MIB
    assert value(metrics, "synvirt_copy_rate_bytes_per_second", **way) == MIB
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_done=8 * MIB, rate_bps=MIB))
    assert value(metrics, "synvirt_copied_bytes_total", **way) == 10 * MIB
    copied(service, job.id, 12 * MIB)
    service.board.unpin(job.id)
    service.move(job.id, State.COMPLETED)
    assert value(metrics, "synvirt_copied_bytes_total", **way) == 12 * MIB
    assert value(metrics, "synvirt_copy_rate_bytes_per_second", **way) == 0, "known, and idle"
    assert value(metrics, "synvirt_jobs_ended_total", state="Completed", source="ova_archive") == 1


def test_a_job_that_began_and_ended_between_two_looks_is_counted(service: Service, metrics: Metrics) -> None:
    job = service.submit(PLAN.model_copy(update={"source": PlanSource(Offline=OfflineKind.QCOW2)}))
    service.move(job.id, State.COPYING_FULL)
    copied(service, job.id, 5 * MIB)
    service.move(job.id, State.FAILED, error=failed())
    for _ in range(2):
        assert value(metrics, "synvirt_copied_bytes_total", source="qcow2", destination="default") == 5 * MIB
        assert value(metrics, "synvirt_job_errors_total", code="E_MIG_DISK_WRITE_FAILED") == 1
        assert value(metrics, "synvirt_jobs_ended_total", state="Failed", source="qcow2") == 1


def test_a_job_that_has_just_ended_is_not_counted_again(service: Service, metrics: Metrics) -> None:
    """The board forgets it a moment later; it may even be removed before."""
    job = service.submit()
    way = {"source": "ova_archive", "destination": "default"}
    service.move(job.id, State.COPYING_FULL)
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_done=9 * MIB, bytes_total=9 * MIB))
    copied(service, job.id, 9 * MIB)
    assert value(metrics, "synvirt_copied_bytes_total", **way) == 9 * MIB
    service.move(job.id, State.FAILED)
    assert [value(metrics, "synvirt_copied_bytes_total", **way) for _ in range(2)] == [9 * MIB] * 2
    service.store.remove(job.id)
    assert value(metrics, "synvirt_copied_bytes_total", **way) == 9 * MIB


def test_what_was_before_the_service_began_is_not_counted_again(service: Service) -> None:
    job = service.submit()
    service.move(job.id, State.COPYING_FULL, error=failed())
    copied(service, job.id, 7 * MIB)
    metrics = Metrics(service.store, service.board, host="local", jobs_at_once=4)
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_done=7 * MIB))
    value(metrics, "synvirt_jobs", state="Queued")
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_done=9 * MIB))
    assert value(metrics, "synvirt_copied_bytes_total", source="ova_archive", destination="default") == 2 * MIB
    assert value(metrics, "synvirt_job_errors_total", code="E_MIG_DISK_WRITE_FAILED") == 0


@pytest.mark.parametrize("looks", [(), ("before",)])
def test_what_another_host_did_before_a_job_came_here_is_not_counted_again(service: Service, looks: tuple[str, ...]) -> None:
    """It was created after both services had begun, and the other one has counted this."""
    way = {"source": "ova_archive", "destination": "default"}
    metrics = Metrics(service.store, service.board, host="elsewhere", jobs_at_once=4)
    job = service.submit()
    service.move(job.id, State.COPYING_FULL, error=failed())
    copied(service, job.id, 7 * MIB)
    for _ in looks:
        assert not value(metrics, "synvirt_copied_bytes_total", **way)
    with service.store._writing() as db:
        db.execute(update(migrations).values(host="elsewhere"))
    service.store.change(job.id, State.COPYING_FULL, lambda before: before.model_copy(update={"host": "elsewhere"}))
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_done=7 * MIB))
    assert not value(metrics, "synvirt_copied_bytes_total", **way)
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_done=9 * MIB))
    assert value(metrics, "synvirt_copied_bytes_total", **way) == 2 * MIB
    assert value(metrics, "synvirt_job_errors_total", code="E_MIG_DISK_WRITE_FAILED") == 0


def test_every_code_is_reported_from_nought_on_and_a_strange_one_has_no_label_of_its_own(
    service: Service, metrics: Metrics
) -> None:
    assert [value(metrics, "synvirt_job_errors_total", code=code) for code in CODES] == [0] * len(CODES)
    job = service.submit()
    service.move(job.id, State.FAILED, error=Problem(code="E_MIG_TOMORROW", message="m", at=now(), state=State.QUEUED))
    assert value(metrics, "synvirt_job_errors_total", code="other") == 1
    assert value(metrics, "synvirt_job_errors_total", code="E_MIG_TOMORROW") is None


def test_the_downtime_of_completed_jobs_is_reported(service: Service, metrics: Metrics) -> None:
    job = service.submit()
    service.store.change(job.id, State.QUEUED, lambda job: job.model_copy(update={"downtime_s": 42.0}))
    service.move(job.id, State.COMPLETED)
    assert value(metrics, "synvirt_downtime_seconds_bucket", le="60.0") == 1
    assert value(metrics, "synvirt_downtime_seconds_bucket", le="30.0") == 0


def test_forecasts_of_outages_are_held_against_what_came_of_them(service: Service, metrics: Metrics) -> None:
    """By how much the p50 was missed, to either side, and whether the p95 was kept; nothing of a job without a forecast."""
    for downtime_s, forecast in ((42.0, (40.0, 50.0)), (10.0, (40.0, 50.0)), (60.0, (40.0, 50.0)), (42.0, None)):
        outage = None if forecast is None else OutageForecast(p50_s=forecast[0], p95_s=forecast[1], at=now())
        job, reported = service.submit(), {"downtime_s": downtime_s, "outage": outage}
        service.store.change(job.id, State.QUEUED, methodcaller("model_copy", update=reported))
        service.move(job.id, State.COMPLETED)
    assert value(metrics, "synvirt_outage_error_seconds_count") == 3
    assert value(metrics, "synvirt_outage_error_seconds_sum") == 2 + 30 + 20
    assert value(metrics, "synvirt_outages_forecast_total", kept="true") == 2
    assert value(metrics, "synvirt_outages_forecast_total", kept="false") == 1


def test_another_hosts_jobs_are_anothers_to_tell(service: Service) -> None:
    metrics = Metrics(service.store, service.board, host="elsewhere", jobs_at_once=4)
    job = service.submit()
    service.move(job.id, State.FAILED, error=failed())
    assert value(metrics, "synvirt_jobs", state="Failed") == 0
    assert value(metrics, "synvirt_job_errors_total", code="E_MIG_DISK_WRITE_FAILED") == 0


# ── cheap ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Store]:
    """5,000 ended jobs, written in one go."""
    from sqlalchemy import insert

    from tests.store.test_store import a_job

    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    jobs = [a_job(state=State.COMPLETED) for _ in range(5000)]
    rows = [{"id": str(job.id), "host": "local", "state": job.state, "document": job.model_dump_json()} for job in jobs]
    with store._writing() as db:
        db.execute(insert(migrations), rows)
    yield store
    store.close()


def test_a_look_at_5000_jobs_reads_no_document_and_grows_by_no_line(full: Store) -> None:
    metrics = Metrics(full, Board(), host="local", jobs_at_once=4)
    calls: list[str] = []
    event.listen(full._engine, "before_cursor_execute", lambda *seen: calls.append(seen[2]))
    text, _ = metrics.text("")
    assert 'synvirt_jobs{state="Completed"} 5000.0' in text.decode()
    assert len(text.splitlines()) < 200
    queries = [query for query in calls if query.startswith("SELECT")]
    # Ended events, events of waves, jobs by state and host, slots held and waited for, jobs under way.
    assert len(queries) == 5, queries


def test_a_wave_reports_by_how_much_its_forecast_was_missed(service: Service, metrics: Metrics) -> None:
    waves = Waves(service.store.waves)
    made = waves.create(wave(member("early"), member("late"), member("unplanned")))
    for one, late_s in zip(made.members or waves.whole(made.id).members, (-90, 4000, None), strict=True):
        at = now()
        planned = None if late_s is None else at - timedelta(seconds=late_s)
        moved = {"cut_over_at": at, "planned_at": planned}
        change_members(service.store.waves, made.id, [one], {S.WAITING}, {"state": S.CUTTING_OVER, **moved})
        change_members(service.store.waves, made.id, [one], {S.CUTTING_OVER}, {"state": S.HEALTHY})
    assert value(metrics, "synvirt_wave_forecast_error_seconds_count") == 2
    assert value(metrics, "synvirt_wave_forecast_error_seconds_sum") == pytest.approx(4090, abs=1)
    assert value(metrics, "synvirt_wave_forecast_error_seconds_bucket", le="300.0") == 1


def test_each_route_is_reported_by_the_path_that_the_document_gives_it(service: Service, client: httpx.Client) -> None:
    paths = {path: operations for path, operations in service.app.openapi()["paths"].items() if not path.endswith("/stream")}
    for path, operations in paths.items():
        some = re.sub(r"{\w+}", str(UUID(int=1)), path)
        for method in operations:
            client.request(method, f"http://synvirt{some}")
    reported = re.findall(r'answer_seconds_count{[^}]*route="([^"]+)"', client.get("http://synvirt/metrics").text)
    assert set(reported) - {"other", "/metrics"} == set(paths) - {"/metrics"}
