"""Watching a job: to its end, through a restart, until Ctrl-C, on a terminal and elsewhere."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.cli.client import Client, StreamEvent
from synvirt.cli.migrating.watching import Bars, Lines, described, stage
from synvirt.errors import NotFound, ServiceUnreachable
from synvirt.model.job import CutoverRequest, DiskProgress, Migration, Progress, ProgressUpdate
from synvirt.model.kinds import Mode, State
from synvirt.model.plan import Target
from synvirt.model.values import now
from synvirt.sizes import MIB, sized
from synvirt.web.pages import Pages
from synvirt.web.words import state_words
from tests.cli.conftest import Run
from tests.fakes.service import PLAN, Service, failed
from tests.house import live_plan
from tests.running.processes import until

SYNVIRT: list[str | Path] = [sys.executable, "-c", "from synvirt.cli import app; app()"]


def begin_then(
    service: Service, *states: State, pause_s: float = 0.15, seen: Callable[[State, int], object] = lambda _state, _gib: None
) -> None:
    """Each new job moves through `states`; a copy has ten figures, the last of which stands long enough to be seen. `seen` is
    called before it goes on from a state, and from three of the figures, in GiB; it goes on when that returns."""

    def move(job_id: UUID) -> None:
        before = State.QUEUED
        for state in states:
            seen(before, 0)
            time.sleep(pause_s)
            service.move(job_id, state, error=failed() if state == State.FAILED else None)
            if state == State.COPYING_FULL:
                for done in range(11):
                    service.board.pin(job_id, state, Progress(bytes_total=10 << 30, bytes_done=done << 30, rate_bps=1e9))
                    if done in (3, 6, 10):
                        seen(state, done)
                    time.sleep(pause_s if done < 10 else 10 * pause_s)
            before = state
        service.board.unpin(job_id)

    service.begin = lambda job_id: threading.Thread(target=move, args=(job_id,), daemon=True).start()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[State, int], None]:
    """Waits until a command in this process has shown the state of a job, or so many GiB of its copy."""
    shown: set[tuple[str, int]] = set()
    follow = Client.follow

    def followed(*given: Any, **named: Any) -> Iterator[StreamEvent]:
        for event in follow(*given, **named):
            yield event
            content = json.loads(event.data)
            shown.add((content["state"], content["progress"]["bytes_done"] >> 30 if event.event == "progress" else 0))

    monkeypatch.setattr(Client, "follow", followed)
    return lambda state, gib: until(lambda: (state, gib) in shown)


@pytest.fixture
def ova(service: Service) -> str:
    (service.settings.imports_dir / "web.ova").write_bytes(b"nothing")
    return "web.ova"


def test_a_job_that_completes(service: Service, run: Run, ova: str, seen: Callable[[State, int], None]) -> None:
    begin_then(service, State.COPYING_FULL, State.STARTING, State.COMPLETED, seen=seen)
    done = run("import", ova, "--kind", "ova_archive", "--wait")
    lines = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert done.exit_code == 0
    assert [line for line in lines if line.endswith("web.ova")] == [
        f"{state}  web.ova" for state in ("Queued", "CopyingFull", "Starting", "Completed")
    ]
    figures = [line for line in lines if "%" in line]
    assert 3 <= len(figures) <= 11
    assert figures[0].startswith("CopyingFull  ")
    assert figures[-1].endswith("10.0 GiB of 10.0 GiB, 954 MiB/s")


def test_a_job_that_is_held_says_how_it_goes_on_and_claims_no_speed() -> None:
    """Between two deltas nothing is copied, for hours maybe."""
    reported: list[str] = []
    lines = Lines(out=reported.append)
    done = Progress(bytes_total=MIB, bytes_done=MIB, rate_bps=5e7, eta_s=0)
    job = Migration(
        id=uuid4(), name="web", plan=live_plan(warm={"cutover": "manual"}), mode_effective=Mode.WARM, created_at=now()
    )
    for state in (State.COPYING_FULL, State.DELTA_SYNCING, State.DELTA_SYNCING, State.CUTTING_OVER):
        lines.moved(job.model_copy(update={"state": state, "progress": done}))
        lines.progressed(done)
    held = [number for number, line in enumerate(reported) if f"synvirt migrations cutover {job.id}" in line]
    assert [line.split(" ", 1)[1] for line in reported[: held[0]]] == [
        "CopyingFull  web",
        f"CopyingFull  {described(done)}",
        "DeltaSyncing  web",
    ]
    assert len(held) == 1
    assert reported[held[0] + 1].endswith("DeltaSyncing  100 %, 1.0 MiB of 1.0 MiB")
    reported.clear()
    waits = job.model_copy(update={"state": State.DELTA_SYNCING})
    lines = Lines(out=reported.append)
    for request in (None, CutoverRequest(at=now()), CutoverRequest(at=now())):
        lines.moved(waits.model_copy(update={"cutover_request": request}))
    assert [line.split(" ", 1)[1] for line in reported[2:]] == [
        "held until it has a slot for its next pass; it was asked to cut over"
    ]
    automatic = job.model_copy(update={"plan": live_plan(), "state": State.DELTA_SYNCING})
    assert not automatic.held
    reported.clear()
    Lines(out=reported.append).moved(automatic)
    assert len(reported) == 1


@pytest.mark.parametrize("end", [State.FAILED, State.CANCELLED])
def test_a_job_that_does_not(service: Service, run: Run, ova: str, end: State) -> None:
    begin_then(service, State.COPYING_FULL, end, pause_s=0.02)
    done = run("import", ova, "--kind", "ova_archive", "--wait")
    assert done.exit_code == 1
    expected = "E_MIG_DISK_WRITE_FAILED: the disk is full\nhint: make room" if end == State.FAILED else "E_MIG_CANCELLED: "
    assert done.stderr.startswith(expected)


def test_waiting_with_json_prints_the_ended_job_and_nothing_else(service: Service, run: Run, ova: str) -> None:
    begin_then(service, State.COPYING_FULL, State.COMPLETED, pause_s=0.02)
    done = run("import", ova, "--kind", "ova_archive", "--wait", "--json")
    job = Migration.model_validate_json(done.stdout)
    assert (done.exit_code, job.state) == (0, State.COMPLETED)
    assert job == service.store.get(job.id)


def test_watching_with_json_prints_each_event(service: Service, run: Run, seen: Callable[[State, int], None]) -> None:
    begin_then(service, State.COPYING_FULL, State.COMPLETED, pause_s=0.1, seen=seen)
    job = service.submit()
    done = run("migrations", "watch", job.id, "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert {event["id"] for event in events} == {str(job.id)}
    assert [event["state"] for event in events if "plan" in event][-2:] == ["CopyingFull", "Completed"]
    assert [event for event in events if "plan" not in event], "figures"


def test_watching_what_has_ended(service: Service, run: Run) -> None:
    job = service.submit()
    service.move(job.id, State.COMPLETED)
    assert run("migrations", "watch", job.id).exit_code == 0
    reported = run("migrations", "watch", job.id, "--json")
    assert (reported.exit_code, json.loads(reported.stdout)["state"]) == (0, "Completed")


def test_a_restart_of_the_service_is_waited_for_and_what_was_missed_is_reported(tmp_path: Path) -> None:
    service = Service(tmp_path, has_pages=False)
    job = service.submit()
    with service.served():
        command: list[str | Path] = [*SYNVIRT, "--data-dir", tmp_path, "migrations", "watch", str(job.id)]
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        reported = [watching.stdout.readline()]
        service.move(job.id, State.COPYING_FULL)
        reported += [watching.stdout.readline()]
    service.move(job.id, State.STARTING)
    service.move(job.id, State.COMPLETED)
    time.sleep(0.5)
    service.close()
    again = Service(tmp_path, has_pages=False)
    with again.served():
        rest, _ = watching.communicate(timeout=60)
    again.close()
    assert watching.returncode == 0
    assert [line.split(" ", 1)[1] for line in [*reported, *rest.splitlines(keepends=True)]] == [
        "Queued  web.ova\n",
        "CopyingFull  web.ova\n",
        "the service does not answer; waiting for it\n",
        "Starting  web.ova\n",
        "Completed  web.ova\n",
    ]


def test_a_job_that_is_removed_before_its_end_was_seen_ends_the_watch(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may remove a job as it ends."""
    monkeypatch.setattr("synvirt.cli.client.RECONNECT_EVERY_S", 0)
    job, lost = service.submit(), list[str]()
    with Client.local(service.settings.socket_path) as client:
        events = client.follow(job_id=job.id, on_lost=lambda: lost.append("waiting"))
        next(events)
        service.move(job.id, State.COMPLETED)
        service.store.remove(job.id)
        with pytest.raises(NotFound, match=f"there is no migration {job.id}"):
            list(events)
    assert lost == [], "the service was never away"


def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.cli.client.RECONNECT_EVERY_S", 0.05)
    service = Service(tmp_path, has_pages=False)
    job = service.submit()
    with Client.local(service.settings.socket_path) as client:
        with service.served():
            events = client.follow(job_id=job.id, patience_s=0.5)
            next(events)
        with pytest.raises(ServiceUnreachable, match="no service answers"):
            list(events)
    service.close()


def test_ctrl_c_leaves_the_job_running_and_says_how_to_watch_it_again(service: Service, ova: str) -> None:
    arguments: list[str | Path] = ["--data-dir", service.settings.data_dir, "import", ova, "--kind", "ova_archive", "--wait"]
    child = subprocess.Popen([*SYNVIRT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert "Queued" in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    [job] = service.begun
    assert (child.returncode, out, err) == (130, f"The job goes on. Watch it again: synvirt migrations watch {job}\n", "")
    assert not service.store.cancel_requested(job)


def test_bars_on_a_terminal(service: Service, ova: str) -> None:
    begin_then(service, State.COPYING_FULL, State.COMPLETED)
    ours, theirs = pty.openpty()
    arguments: list[str | Path] = ["--data-dir", service.settings.data_dir, "import", ova, "--kind", "ova_archive", "--wait"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([*SYNVIRT, *arguments], stdout=theirs, env=environment) as child:
        os.close(theirs)
        screen = _all_of(ours, lambda: child.poll() is not None)
        assert child.wait(60) == 0
    os.close(ours)
    for part in ("CopyingFull", "━", "GiB of 10.0 GiB", "Completed"):
        assert part in screen


def _all_of(descriptor: int, ended: Callable[[], bool]) -> str:
    screen = b""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if select.select([descriptor], [], [], 0.2)[0]:
            try:
                screen += os.read(descriptor, 65536)
            except OSError:  # the other side is closed
                break
        elif ended():
            break
    return screen.decode()


# ── the words, without a service ─────────────────────────────────────────────────────────────────────────────────────


def test_a_line_at_each_tenth_and_each_ten_silent_seconds() -> None:
    reported: list[str] = []
    now = [0.0]
    lines = Lines(out=reported.append, clock=lambda: now[0])
    for done in range(101):
        now[0] += 0.01
        lines.progressed(Progress(bytes_total=100, bytes_done=done))
    assert len(reported) == 10
    reported.clear()
    for _ in range(60):
        now[0] += 1
        lines.progressed(Progress(bytes_total=100, bytes_done=100))
    assert len(reported) == 6


def test_each_of_several_disks_has_a_bar_until_all_are_copied() -> None:
    def rows(*done: int) -> list[DiskProgress]:
        return [
            DiskProgress(
                key=f"disk{at}",
                label=f"disk{at}.vmdk",
                state="copied" if each == 4 else "copying" if each else "waiting",
                bytes_total=4 * MIB,
                bytes_done=each * MIB,
            )
            for at, each in enumerate(done)
        ]

    shown = Bars()
    shown.disks(rows(1, 0))
    shown.disks(rows(4, 2))
    bars = {task.description.strip(): task for task in shown._bar.tasks[1:]}
    assert list(bars) == ["disk0.vmdk", "disk1.vmdk"]
    assert [task.fields["figures"] for task in bars.values()] == ["copied", "2.0 MiB of 4.0 MiB"]
    assert [task.completed for task in bars.values()] == [4 * MIB, 2 * MIB]
    shown.disks(rows(4, 4))
    assert len(shown._bar.tasks) == 1
    shown.disks(rows(1))
    assert len(shown._bar.tasks) == 1


def test_a_note_that_is_not_fatal_is_reported_once(service: Service) -> None:
    reported: list[str] = []
    lines = Lines(out=reported.append)
    note = failed("it cannot track changes").model_copy(update={"code": "E_MIG_CBT_UNSUPPORTED", "fatal": False})
    job = service.submit().model_copy(update={"last_error": note, "mode_effective": Mode.COLD})
    for _ in range(3):
        lines.moved(job)
    said = ["Queued  web.ova", "E_MIG_CBT_UNSUPPORTED: it cannot track changes", "hint: make room"]
    assert [line.split(" ", 1)[1] for line in reported] == said


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (100 << 30, "100 GiB"), (3 << 50, "3072 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert sized(count) == text


def test_figures_without_a_total() -> None:
    assert described(Progress()) == "…, 0 B of 0 B, 0 B/s"


@pytest.mark.parametrize(("done", "shown"), [(0, 0), (317, 31), (319, 31), (999, 99), (1000, 100), (1001, 100)])
def test_a_share_is_that_of_the_page_and_100_percent_are_all(done: int, shown: int) -> None:
    update = ProgressUpdate(id=uuid4(), state=State.COPYING_FULL, progress=Progress(bytes_total=1000, bytes_done=done))
    assert described(update.progress).split()[0] == str(shown)
    assert Pages("").part("row_figures.html", job=update).count(f">{shown} %<") == 2


def test_of_a_guest_that_is_not_to_be_started_nothing_says_that_it_starts() -> None:
    quiet = PLAN.model_copy(update={"target": Target(start=False)})
    for plan, stage_name, shown_as in ((PLAN, "Starting", "Starting"), (quiet, "Defining", "Defining")):
        job = Migration(id=uuid4(), name="a", plan=plan, state=State.STARTING, mode_effective=Mode.COLD, created_at=now())
        assert stage(job) == stage_name
        assert state_words(job.state, plan.target.start) == shown_as
        assert stage(job.model_copy(update={"state": State.COMPLETED})) == "Completed"


def test_of_what_is_done_no_rate_is_shown() -> None:
    assert described(Progress(bytes_total=2048, bytes_done=2048, rate_bps=0, eta_s=0)) == "100 %, 2.0 KiB of 2.0 KiB"
    assert described(Progress(bytes_total=2048, bytes_done=0, rate_bps=0)).endswith("0 B/s")
    assert described(Progress(bytes_total=2048, bytes_done=1024, rate_bps=0), ended=True) == "50 %, 1.0 KiB of 2.0 KiB"
