"""The stream of updates: snapshots, replay, figures, heartbeats, and clients that do not read."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from synvirt.api.stream import Pace
from synvirt.cli.client import Client, StreamEvent
from synvirt.model.job import DiskProgress, Migration, Progress, ProgressUpdate
from synvirt.model.kinds import Mode, State
from synvirt.model.values import now
from synvirt.store import Store
from tests.api.conftest import with_the_page
from tests.fakes.service import PREFIX, QUICK, Service, failed
from tests.house import give_to


def listening(service: Service, **wanted: Any) -> Iterator[StreamEvent]:
    with Client.local(service.settings.socket_path) as client:
        yield from client.stream(**wanted)


def states(events: Iterator[StreamEvent], count: int) -> list[tuple[str, str]]:
    """(id, state) of the next `count` migrations."""
    moves = ((document["id"], document["state"]) for document in (json.loads(e.data) for e in events if e.event == "migration"))
    return list(islice(moves, count))


def test_a_new_client_first_gets_every_job_that_has_not_ended(service: Service) -> None:
    queued, copying, ended = (service.submit().id for _ in range(3))
    service.move(copying, State.COPYING_FULL)
    service.move(ended, State.COMPLETED)
    service.move(queued, State.COPYING_FULL)
    events = listening(service)
    assert states(events, 2) == [(str(copying), "CopyingFull"), (str(queued), "CopyingFull")]
    later = service.submit().id
    assert states(events, 1) == [(str(later), "Queued")]


def test_each_change_of_state_or_error_is_reported_with_the_whole_job_and_a_growing_id(service: Service) -> None:
    job = service.submit().id
    events = listening(service)
    assert states(events, 1) == [(str(job), "Queued")]
    service.move(job, State.COPYING_FULL)
    service.move(job, State.COPYING_FULL, error=failed())
    service.move(job, State.FAILED)
    reported = list(islice(events, 3))
    assert [json.loads(event.data)["state"] for event in reported] == ["CopyingFull", "CopyingFull", "Failed"]
    assert [json.loads(event.data)["last_error"] is not None for event in reported] == [False, True, True]
    ids = [event.id for event in reported]
    assert all(id_ is not None for id_ in ids)
    assert ids == sorted({id_ for id_ in ids if id_})
    assert json.loads(reported[2].data) == json.loads(service.store.get(job).model_dump_json())


def test_what_was_missed_is_replayed(service: Service) -> None:
    job = service.submit().id
    first = next(listening(service))
    service.move(job, State.COPYING_FULL)
    service.move(job, State.STARTING)
    service.move(job, State.COMPLETED)
    other = service.submit().id
    replayed = states(listening(service, last_event_id=first.id), 4)
    assert replayed == [(str(job), "CopyingFull"), (str(job), "Starting"), (str(job), "Completed"), (str(other), "Queued")]


def test_a_long_replay_comes_in_pages(service: Service) -> None:
    jobs = [str(service.submit().id) for _ in range(250)]
    assert [id_ for id_, _ in states(listening(service, last_event_id=0), 250)] == jobs


def test_a_cut_in_the_middle_of_the_snapshot_loses_nothing(service: Service) -> None:
    """The ids of a snapshot ascend: wherever the client was cut off, the rest is a replay."""
    jobs = {str(service.submit().id) for _ in range(5)}
    for count in range(1, 6):
        events = listening(service)
        seen = list(islice(events, count))
        rest = states(listening(service, last_event_id=seen[-1].id), 5 - count)
        assert {json.loads(event.data)["id"] for event in seen} | {id_ for id_, _ in rest} == jobs


@pytest.mark.parametrize("stranger", ["99999", "nonsense", "-1", "", "²", "9" * 400])
def test_an_id_that_is_none_of_ours_starts_over(service: Service, client: httpx.Client, stranger: str) -> None:
    service.submit()
    with client.stream("GET", "/migrations/stream", headers=[(b"Last-Event-ID", stranger.encode())]) as response:
        assert response.status_code == 200
        assert "event: migration" in islice(response.iter_lines(), 3)


def test_it_is_narrowed_to_one_job(service: Service) -> None:
    one, other = service.submit().id, service.submit().id
    events = listening(service, job_id=one)
    assert states(events, 1) == [(str(one), "Queued")]
    for job in (other, one):
        service.board.pin(job, State.QUEUED, Progress(bytes_total=10, bytes_done=1))
    service.move(other, State.COPYING_FULL)
    assert json.loads(next(events).data)["id"] == str(one)
    service.move(one, State.COMPLETED)
    assert states(events, 1) == [(str(one), "Completed")]
    assert states(listening(service, job_id=one), 1) == [(str(one), "Completed")], "narrowed to a job that has ended: that job"


def test_narrowed_to_a_job_that_is_removed_it_ends(service: Service) -> None:
    """Its end and its removal may come between two looks: nobody would ever hear of it again."""
    one = service.submit().id
    events = listening(service, job_id=one)
    assert states(events, 1) == [(str(one), "Queued")]
    service.move(one, State.COMPLETED)
    service.store.remove(one)
    assert len(list(events)) <= 1  # its end, where it was seen


@pytest.mark.parametrize("unknown", [str(UUID(int=1)), "nope"])
def test_narrowed_to_no_job(client: httpx.Client, unknown: str) -> None:
    response = client.get("/migrations/stream", params={"migration_id": unknown})
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.status_code == (404 if unknown != "nope" else 400)


def test_its_headers(client: httpx.Client) -> None:
    with client.stream("GET", "/migrations/stream") as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-store"


def test_figures_come_at_most_twice_a_second_a_job(tmp_path: Path) -> None:
    service = Service(tmp_path, has_pages=False, pace=Pace())
    jobs = [service.submit().id for _ in range(3)]
    done = threading.Event()

    def work() -> None:
        for number in range(10**9):
            if done.wait(0.005):
                return
            for job in jobs:
                service.board.pin(job, State.QUEUED, Progress(bytes_total=10**9, bytes_done=number))

    with service.served():
        threading.Thread(target=work, daemon=True).start()
        seen = dict.fromkeys(map(str, jobs), 0)
        began, newest = time.monotonic(), None
        for event in listening(service):
            if event.event == "migration":
                newest = event.id
            if event.event == "progress":
                assert event.id == newest  # a figure has no number of its own
                update = json.loads(event.data)
                assert set(update) == {"id", "state", "progress", "disks"}
                seen[update["id"]] += 1
            if min(seen.values()) >= 5:
                break
        took = time.monotonic() - began
        done.set()
    service.close()
    # However late some of them come: never more than one each half a second, and the first.
    assert max(seen.values()) <= took / 0.5 + 1


def test_the_rows_of_disks_come_with_the_figures(service: Service) -> None:
    job = service.submit().id
    rows = tuple(DiskProgress(key=key, label=key, state="copying", bytes_total=9, bytes_done=3) for key in ("a", "b"))
    service.board.pin(job, State.QUEUED, Progress(bytes_total=18, bytes_done=6), rows)
    reported = next(event for event in listening(service) if event.event == "progress")
    assert ProgressUpdate.model_validate_json(reported.data).disks == rows
    assert service.board.disks(job, State.COPYING_FULL) == ()


def test_a_figure_that_stands_still_is_reported_once(service: Service) -> None:
    job = service.submit().id
    service.board.pin(job, State.QUEUED, Progress(bytes_done=1))
    events = listening(service)
    assert [next(events).event for _ in range(2)] == ["migration", "progress"]
    time.sleep(5 * QUICK.progress_every_s)
    service.move(job, State.COPYING_FULL)
    assert next(events).event == "migration"


def test_it_beats(service: Service, client: httpx.Client) -> None:
    started = time.monotonic()
    with client.stream("GET", "/migrations/stream") as response:
        lines = (line for line in response.iter_lines() if line.startswith(":"))
        assert len(list(islice(lines, 4))) == 4
    assert 0.9 <= time.monotonic() - started < 45  # the first comes at once, then each 0.3 s; the service's own pace is 15 s
    assert Pace().heartbeat_every_s == 15


def test_events_of_another_host_are_seen_without_the_board(service: Service) -> None:
    """Several hosts share one database: their commits do not ring our board."""
    job = service.submit().id
    events = listening(service)
    next(events)
    service.store.on_commit = lambda: None
    service.move(job, State.COPYING_FULL)
    assert states(events, 1) == [(str(job), "CopyingFull")]


@pytest.fixture
def with_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of SQLite has none; a service looks for others only in one that may be shared."""
    monkeypatch.setattr(Store, "is_shared", True)


@with_the_page
@pytest.mark.usefixtures("with_other_hosts")
def test_the_figures_of_a_job_that_another_host_copies_are_streamed(service: Service) -> None:
    """Its board is in that host's memory: what it stores at each flush is shown, to clients and on the page."""
    store, job, held = service.store, service.submit(), service.submit()
    for one in (job, held):
        service.move(one.id, State.COPYING_FULL)
        give_to(store, one.id, "kvm2")
    assert store.slots.take(job.id, {"destination kvm2": 4}, host="kvm2")
    events = (json.loads(event.data) for event in listening(service) if event.event == "progress")
    for done in (5 << 20, 9 << 20):
        for one in (job, held):  # a job without a slot has no pass under way: nobody asks for its figures
            figures = {"progress": Progress(bytes_total=12 << 20, bytes_done=done, rate_bps=1e6)}
            store.change(one.id, State.COPYING_FULL, partial(Migration.model_copy, update=figures))
        seen = next(one for one in events if one["progress"]["bytes_done"])
        assert (seen["id"], seen["state"], seen["progress"]["bytes_done"]) == (str(job.id), "CopyingFull", done)
    transport = httpx.HTTPTransport(uds=str(service.settings.socket_path))
    with (
        httpx.Client(transport=transport, base_url="http://synvirt", timeout=60) as client,
        client.stream("GET", f"/events?after={store.last_event_id()}") as page,
    ):
        assert any(f"event: figures-{job.id}" in line for line in page.iter_lines())


def test_a_client_that_does_not_read_holds_up_nobody(service: Service) -> None:
    """It takes no more than the socket's buffers: the job, the other clients and the service go on."""
    job = service.submit().id
    stuck = []
    for _ in range(5):
        sock = socket.socket(socket.AF_UNIX)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(str(service.settings.socket_path))
        sock.sendall(f"GET {PREFIX}/migrations/stream HTTP/1.1\r\nHost: x\r\nLast-Event-ID: 0\r\n\r\n".encode())
        stuck.append(sock)
    started = time.monotonic()
    filler = [
        failed("x" * 1000).model_copy(update={"at": now(), "message": f"{number} " + "x" * 20_000}) for number in range(60)
    ]
    for error in filler:
        service.move(job, State.QUEUED, error=error)
    assert time.monotonic() - started < 60
    events = listening(service, last_event_id=0)
    assert len(states(events, 61)) == 61
    with service.local() as client:
        assert client.get(f"/migrations/{job}").status_code == 200
    for sock in stuck:
        sock.close()


def test_a_client_that_went_away_is_forgotten(tmp_path: Path) -> None:
    service = Service(tmp_path, has_pages=False)
    with service.served() as server:
        connections = server.connections
        for _ in range(20):
            events = listening(service)
            service.submit()
            next(events)
            assert connections() > 0
            del events
        until = time.monotonic() + 60
        while connections() and time.monotonic() < until:
            time.sleep(0.05)
        assert connections() == 0
    service.close()


def test_the_downgrade_is_reported(service: Service) -> None:
    job = service.submit().id
    events = listening(service)
    next(events)

    def downgrade(known: Any) -> Any:
        note = failed().model_copy(update={"code": "E_MIG_CBT_UNSUPPORTED", "fatal": False})
        return known.model_copy(update={"mode_effective": Mode.COLD, "last_error": note})

    service.store.change(job, State.QUEUED, downgrade)
    document = json.loads(next(events).data)
    assert (document["last_error"]["code"], document["last_error"]["fatal"]) == ("E_MIG_CBT_UNSUPPORTED", False)
    assert UUID(document["id"]) == job
