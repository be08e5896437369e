"""The stream of backup runs has the laws of the migrations' stream (test_stream.py): snapshots, replay, figures, heartbeats."""

import json
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from synvirt.backups.model import BackupRun, Status
from synvirt.backups.runs import RunKind
from synvirt.backups.under_way import UnderWay
from synvirt.cli.client import RUNS, Client, StreamEvent
from synvirt.errors import RepositoryFull
from synvirt.model.values import now
from tests.fakes.backups import ended
from tests.fakes.service import Service

WAIT_S = 60


class Work:
    """A run that does what the test asks."""

    def __init__(self, service: Service) -> None:
        self._runs = service.backups.runs
        self.run = BackupRun(id=uuid4(), created_at=now())
        self._go, self._fails = threading.Event(), False
        self._took: list[UnderWay] = []
        self._begun = threading.Event()
        self._runs._kinds = {"backup": RunKind(lambda _: self._work)}
        with self._runs.lock:
            self._runs.begin(self.run)

    @property
    def id(self) -> str:
        return str(self.run.id)

    @property
    def under_way(self) -> UnderWay:
        assert self._begun.wait(WAIT_S)
        return self._took[0]

    def _work(self, under_way: UnderWay) -> None:
        self._took.append(under_way)
        self._begun.set()
        assert self._go.wait(WAIT_S)
        if self._fails:
            raise RepositoryFull("no room")

    def end(self, *, fails: bool = False) -> None:
        self._fails = fails
        self._go.set()


@pytest.fixture
def work(service: Service) -> Iterator[Work]:
    made = Work(service)
    assert made.under_way
    yield made
    made.end()


def listening(service: Service, **wanted: Any) -> Iterator[StreamEvent]:
    with Client.local(service.settings.socket_path) as client:
        yield from client.stream(RUNS, **wanted)


def statuses(events: Iterator[StreamEvent], count: int) -> list[tuple[str, str]]:
    """(id, status) of the next `count` runs."""
    moves = ((document["id"], document["status"]) for document in (json.loads(e.data) for e in events if e.event == "run"))
    return list(islice(moves, count))


def test_a_new_client_first_gets_every_run_that_has_not_ended(service: Service, work: Work) -> None:
    over = Work(service)
    over.end()
    ended(service.backups, over.id)
    events = listening(service)
    assert statuses(events, 1) == [(work.id, "preparing")]
    later = Work(service)
    assert statuses(events, 2) == [(later.id, "queued"), (later.id, "preparing")]
    later.end()


def test_each_change_is_reported_at_once_with_the_whole_run_and_a_growing_id(service: Service, work: Work) -> None:
    events = listening(service, job_id=work.id)
    assert statuses(events, 1) == [(work.id, "preparing")]
    work.under_way.move(Status.TRANSFERRING)
    work.under_way.warn("E_BAK_SOMETHING", "it is so", "web")
    work.end(fails=True)
    reported = list(islice((event for event in events if event.event == "run"), 3))
    assert [json.loads(event.data)["status"] for event in reported] == ["transferring", "transferring", "failed"]
    assert [len(json.loads(event.data)["warnings"]) for event in reported] == [0, 1, 1]
    last = json.loads(reported[2].data)
    assert last["error"]["code"] == "E_BAK_REPOSITORY_FULL"
    assert last == json.loads(service.backups.runs.get(work.run.id).model_dump_json())
    ids = [event.id or 0 for event in reported]
    assert ids == sorted(set(ids))


def test_what_was_missed_is_replayed(service: Service, work: Work) -> None:
    first = next(event for event in listening(service) if event.event == "run")
    work.under_way.move(Status.TRANSFERRING)
    work.under_way.move(Status.COMMITTING)
    work.end()
    ended(service.backups, work.id)
    replayed = statuses(listening(service, last_event_id=first.id), 3)
    assert replayed == [(work.id, "transferring"), (work.id, "committing"), (work.id, "completed")]


def test_it_is_narrowed_to_one_run_ended_or_not(service: Service, work: Work) -> None:
    other = Work(service)
    assert other.under_way
    events = listening(service, job_id=work.id)
    assert statuses(events, 1) == [(work.id, "preparing")]
    other.under_way.move(Status.TRANSFERRING)
    other.end()
    work.end()
    assert statuses(events, 1) == [(work.id, "completed")]
    assert statuses(listening(service, job_id=work.id), 1) == [(work.id, "completed")]


def test_figures_are_reported_without_an_id_and_spaced_and_once(service: Service, work: Work) -> None:
    events = listening(service, job_id=work.id)
    begun = next(events)
    assert statuses(iter([begun]), 1) == [(work.id, "preparing")]
    stop = threading.Event()

    def read() -> None:
        for count in range(1, 10**6):
            work.under_way.figure(10**7, count)
            if stop.wait(0.001):
                break
        work.under_way.figure(10**7, 10**7, 5)

    reader = threading.Thread(target=read)
    reader.start()
    # Before the first figure the one of «preparing» may come.
    reported = list(islice((event for event in events if event.event == "progress"), 4))
    stop.set()
    reader.join()
    updates = [json.loads(event.data) for event in reported]
    assert all(set(update) == {"id", "status", "progress"} and update["id"] == work.id for update in updates)
    assert [event.id for event in reported] == [begun.id] * 4  # a figure has none of its own
    done = [update["progress"]["bytes_done"] for update in updates]
    assert done == sorted(set(done))
    last = next(one for one in map(_progress, events) if one["bytes_done"] == 10**7)
    assert (last["bytes_total"], last["bytes_zero"], last["eta_s"]) == (10**7, 5, 0.0)
    work.end()
    run = json.loads(next(event for event in events if event.event == "run").data)
    assert run["status"] == "completed"
    assert run["progress"] == {"bytes_total": 10**7, "bytes_done": 10**7, "bytes_zero": 5, "rate_bps": 0.0, "eta_s": None}


def _progress(event: StreamEvent) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event.data)["progress"]
    return found


def test_it_beats(service: Service) -> None:
    with _client(service) as client, client.stream("GET", "/runs/stream") as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-store"
        comments = (line for line in response.iter_lines() if line.startswith(":"))
        assert len(list(islice(comments, 3))) == 3


@pytest.mark.parametrize("stranger", ["99999", "nonsense", "-1", "", "9" * 400])
def test_an_id_that_is_none_of_ours_starts_over(service: Service, work: Work, stranger: str) -> None:
    headers = [(b"Last-Event-ID", stranger.encode())]
    with _client(service) as client, client.stream("GET", "/runs/stream", headers=headers) as response:
        assert response.status_code == 200
        assert "event: run" in islice(response.iter_lines(), 3)


@pytest.mark.parametrize(("unknown", "status"), [(str(UUID(int=1)), 404), ("nope", 400)])
def test_narrowed_to_no_run(service: Service, unknown: str, status: int) -> None:
    with _client(service) as client:
        response = client.get("/runs/stream", params={"run_id": unknown})
    assert response.headers["Content-Type"] == "application/problem+json"
    assert (response.status_code, response.json()["code"][:6]) == (status, "E_BAK_")


def test_it_is_described(service: Service) -> None:
    with _client(service) as client:
        document = client.get("http://synvirt/openapi.json").json()
    operation = document["paths"]["/api/v1/backup/runs/stream"]["get"]
    assert list(operation["responses"]["200"]["content"]) == ["text/event-stream"]
    assert [parameter["name"] for parameter in operation["parameters"]] == ["run_id", "Last-Event-ID"]
    assert "RunUpdate" in document["components"]["schemas"]


def test_old_events_are_swept_and_ids_go_on_growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.store.backups.EVENTS_KEPT", 1)
    made = Service(tmp_path)
    work = Work(made)
    work.end()
    ended(made.backups, work.id)
    newest = made.backups.runs.last_event_id()
    made.close()
    again = Service(tmp_path)
    assert [event.id for event in again.backups.runs.events_after(0)] == [newest]
    other = Work(again)
    other.end()
    ended(again.backups, other.id)
    assert again.backups.runs.last_event_id() > newest
    assert [event.job_id for event in again.backups.runs.newest_events(job_id=work.run.id)] == [work.run.id]
    again.close()


def _client(service: Service) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(service.settings.socket_path))
    return httpx.Client(transport=transport, base_url="http://synvirt/api/v1/backup", timeout=60)
