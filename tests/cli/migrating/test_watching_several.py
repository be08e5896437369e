"""Several jobs watched at once."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from synvirt.cli.client import Client
from synvirt.cli.migrating import watching_several
from synvirt.cli.migrating.watching import verdict
from synvirt.errors import NotFound, PersistFailed, ServiceUnreachable, SynvirtError
from synvirt.model.job import Migration, Progress
from synvirt.model.kinds import State
from synvirt.model.values import now
from tests.cli.conftest import Run
from tests.fakes.service import PLAN, Service, failed


def test_nothing_runs(service: Service, run: Run) -> None:
    job = service.submit()
    service.move(job.id, State.FAILED, error=failed())
    end(service, job)
    done = run("migrations", "watch")
    assert (done.exit_code, done.stdout) == (0, "No migration runs\n")


def end(service: Service, job: Migration) -> None:
    state = service.store.get(job.id).state
    service.store.change(job.id, state, lambda job: job.model_copy(update={"finished_at": now()}))


def oldest_first(jobs: list[Migration]) -> list[str]:
    """Their names, by the milliseconds that a document has."""
    documents = [job.model_dump(mode="json") for job in jobs]
    return [one["name"] for one in sorted(documents, key=lambda one: (one["created_at"], one["id"]))]


def stepping(service: Service, jobs: list[Migration], states: list[State]) -> Callable[[float], None]:
    """Instead of a pause: the next thing happens."""
    moves = iter([(job, state) for state in states for job in jobs])

    def pause(_: float) -> None:
        job, state = next(moves)
        service.move(job.id, state, error=failed() if state == State.FAILED else None)
        if state in (State.FAILED, State.COMPLETED):
            end(service, job)

    return pause


def test_all_that_run_are_followed_to_their_ends(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [service.submit(PLAN.model_copy(update={"name": name})) for name in ("web", "database")]
    with Client.local(service.settings.socket_path) as client:
        pause = stepping(service, jobs, [State.COPYING_FULL, State.COMPLETED])
        ended = watching_several.watch_several(client, [], as_json=False, pause=pause)
    assert [(job.name, job.state) for job in ended] == [(name, State.COMPLETED) for name in oldest_first(jobs)]
    lines = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    assert [str(jobs[1].id)[:8], "CopyingFull", "database"] in lines
    assert len(lines) == 6


@pytest.mark.parametrize("named", [True, False])
def test_jobs_that_have_ended_are_not_asked_for_again_and_again(
    service: Service, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """A service may have thousands of them, and is asked each second."""
    others = [service.submit(PLAN.model_copy(update={"name": f"other {number}"})) for number in range(3)]
    for other in others:
        service.move(other.id, State.COMPLETED)
        end(service, other)
    mine = [service.submit(PLAN.model_copy(update={"name": name})) for name in ("web", "database")]
    answered: list[str] = []
    looked: list[list[str]] = []
    with Client.local(service.settings.socket_path) as client:
        ask = client.ask

        def asked(*arguments: Any, **options: Any) -> str:
            answered.append(ask(*arguments, **options))
            return answered[-1]

        monkeypatch.setattr(client, "ask", asked)
        monkeypatch.setattr(watching_several, "_lines", recorder(looked))
        steps = iter([None, None, mine[0], *[None] * 5, mine[1]])

        def pause(_: float) -> None:
            if (job := next(steps)) is not None:
                service.move(job.id, State.COMPLETED)

        ids = [str(job.id) for job in mine] if named else []
        ended = watching_several.watch_several(client, ids, as_json=False, pause=pause)
    assert [job.name for job in ended] == oldest_first(mine)
    assert {tuple(names) for names in looked} == {tuple(oldest_first(mine))}, "a job keeps its place"
    shown = "".join(answered)
    assert not [other for other in others if str(other.id) in shown]
    assert sum(f'"id":"{mine[0].id}"' in answer and '"Completed"' in answer for answer in answered) == 1


@pytest.mark.parametrize("named", [True, False])
def test_a_job_that_is_removed_before_its_end_was_seen_is_shown_no_more_and_ends_no_watch(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: bool
) -> None:
    """It is asked for once a second, and a script may remove a job as it ends."""
    gone, stays = [service.submit(PLAN.model_copy(update={"name": name})) for name in ("gone", "stays")]
    looked: list[list[str]] = []
    monkeypatch.setattr(watching_several, "_lines", recorder(looked))

    ends = iter([None, gone, None, stays])

    def pause(_: float) -> None:
        if (job := next(ends)) is not None:
            service.move(job.id, State.COMPLETED)
        if job is gone:
            service.store.remove(job.id)

    with Client.local(service.settings.socket_path) as client:
        ids = [str(gone.id), str(stays.id)] if named else []
        ended = watching_several.watch_several(client, ids, as_json=False, pause=pause)
        assert looked[1:] == [["gone", "stays"], ["stays"], ["stays"], ["stays"]]
        assert {job.name: verdict(job) for job in ended} == {"gone": False, "stays": True}
        assert capsys.readouterr().err.startswith(f"E_MIG_NOT_FOUND: job {gone.id} was removed before its end was seen")
        with pytest.raises(NotFound):
            watching_several.watch_several(client, [str(gone.id)], as_json=False)


@pytest.mark.parametrize("error", [PersistFailed, ServiceUnreachable])
def test_a_service_or_a_database_that_is_away_is_waited_for(
    service: Service, monkeypatch: pytest.MonkeyPatch, error: type[SynvirtError]
) -> None:
    job = service.submit()
    with Client.local(service.settings.socket_path) as client:
        ask, asked = client.ask, list[str]()

        def away_at_first(*arguments: Any, **options: Any) -> str:
            asked.append(arguments[1])
            if len(asked) == 2:
                raise error("it is away")
            return ask(*arguments, **options)

        monkeypatch.setattr(client, "ask", away_at_first)

        def pause(_: float) -> None:
            if len(asked) == 3:
                service.move(job.id, State.COMPLETED)

        (ended,) = watching_several.watch_several(client, [], as_json=False, pause=pause)
    assert ended.state == State.COMPLETED


def recorder(looked: list[list[str]]) -> Callable[..., Any]:
    def show(*, as_json: bool) -> Any:
        while True:
            looked.append([job.name for job in (yield)])

    return show


def test_one_that_failed_is_the_exit_code_of_all(service: Service, run: Run) -> None:
    good, bad = service.submit(), service.submit()
    for job, state in ((good, State.COMPLETED), (bad, State.FAILED)):
        service.move(job.id, state, error=failed() if state == State.FAILED else None)
    done = run("migrations", "watch", good.id, str(bad.id)[:12])
    assert done.exit_code == 1
    assert done.stderr.startswith("E_MIG_DISK_WRITE_FAILED: the disk is full\nhint: make room")
    reported = [json.loads(line) for line in run("--json", "migrations", "watch", good.id, bad.id).stdout.splitlines()]
    assert {one["state"] for one in reported} == {"Completed", "Failed"}


def test_ctrl_c_leaves_them_running_and_says_how_to_go_on(service: Service, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    service.submit()
    monkeypatch.setattr(watching_several, "watch_several", interrupted)
    done = run("migrations", "watch")
    assert (done.exit_code, done.stdout) == (130, "The jobs go on. Watch them again: synvirt migrations watch\n")
    done = run("migrations", "watch", "--json")
    assert (done.exit_code, "The jobs go on." in done.stdout, "The jobs go on." in done.stderr) == (130, False, True)


def test_the_table_fits_80_columns_and_shows_those_that_run_first(service: Service) -> None:
    progress = Progress(bytes_total=1 << 40, bytes_done=1 << 39, rate_bps=123456789.0, eta_s=123456)
    jobs = [service.submit(PLAN.model_copy(update={"name": f"a guest of a very long name indeed {n}"})) for n in range(30)]
    running = jobs[-1].model_copy(update={"state": State.V2V_PROCESSING, "started_at": now(), "progress": progress})
    console = Console(width=80, record=True, color_system=None)
    console.print(watching_several.table([*jobs[:-1], running]))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith(str(running.id)[:8])
    assert "V2vProcessing" in lines[1]
    assert "1 run, 29 wait, 0 ended" in lines[-1]
    assert len(lines) == watching_several.ROWS_MAX + 2


def test_the_table_says_what_a_job_waits_for(service: Service) -> None:
    """The figures of one that copies are worth more than the note that it runs cold."""
    error = failed().model_copy(update={"fatal": False})
    for rate, remark in ((0.0, error.code), (5e6, "50 %")):
        progress = Progress(bytes_total=1 << 30, bytes_done=1 << 29, rate_bps=rate)
        update = {"state": State.COPYING_FULL, "started_at": now(), "progress": progress, "last_error": error}
        console = Console(width=80, record=True, color_system=None)
        console.print(watching_several.table([service.submit().model_copy(update=update)]))
        assert remark in console.export_text()


def test_the_live_table_is_drawn(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(watching_several, "table", lambda jobs: str(drawn.append(len(jobs))))  # type: ignore[func-returns-value]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    jobs = [service.submit()]
    with Client.local(service.settings.socket_path) as client:
        watching_several.watch_several(client, [], as_json=False, pause=stepping(service, jobs, [State.COMPLETED]))
    assert drawn == [1, 1]
