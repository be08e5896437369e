"""synvirt backup: what each command prints and how it exits; a run watched to its end, until Ctrl-C, on a terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from rich.console import Console

from synvirt.backups.model import Status
from synvirt.cli.backup import commands
from synvirt.cli.backup import jobs as backup_jobs
from synvirt.cli.backup import repositories as backup_repositories
from synvirt.model.values import now
from synvirt.store.backups import Row
from tests.cli.conftest import Run
from tests.cli.migrating.test_watching import SYNVIRT
from tests.drawn import drawn
from tests.fakes.backups import ended
from tests.fakes.service import Service

WAIT_S = 60


def disk_content() -> bytes:
    return drawn(3 << 20)


@pytest.fixture
def home(service: Service, tmp_path: Path) -> Path:
    """Where a repository may be made; the guests `web` and `db` are there."""
    for name in ("web", "db"):
        service.guests.image(name, disk_content())
    (tmp_path / "repository").mkdir()
    return tmp_path / "repository"


@pytest.fixture
def job(run: Run, home: Path) -> str:
    """The id of the job `nightly`."""
    assert run("backup", "add-repository", home, "--name", "here").exit_code == 0
    made = run("backup", "add-job", "web", "--name", "nightly", "--repository", "here", "--keep-last", "3", "--json")
    return str(json.loads(made.stdout)["id"])


def _point(run: Run) -> str:
    assert run("backup", "run", "nightly").exit_code == 0
    return str(json.loads(run("backup", "points", "--json").stdout)["items"][0]["id"])


def test_a_job_is_shown_as_it_was_written(service: Service, run: Run, home: Path) -> None:
    """Before, lists were escaped: g\\u00e4ste."""
    service.guests.image("gäste", disk_content())
    run("backup", "add-repository", home, "--name", "here")
    run("backup", "add-job", "gäste", "--name", "nächtlich", "--repository", "here")
    shown = run("backup", "show-job", "nächtlich").stdout
    assert '["gäste"]' in shown
    assert "\\u" not in shown


def test_a_run_is_reported_as_it_moves_and_what_came_of_it(run: Run, job: str) -> None:
    done = run("backup", "run", "nightly")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    states = [line.split()[1] for line in lines if " backup " in line]
    assert states[-1] == "completed"
    assert set(states) <= {"queued", "preparing", "transferring", "committing", "completed"}
    (point,) = [line.split()[-1] for line in lines if line.startswith("restore point ")]
    assert lines[-1].startswith("3.0 MiB read, 3.0 MiB stored")
    shown = run("backup", "show", json.loads(run("backup", "runs", "--json").stdout)["items"][0]["id"]).stdout
    for part in ("completed", "asked", job, point, "web"):
        assert part in shown


def test_names_and_beginnings_of_ids_are_enough(run: Run, job: str) -> None:
    point = _point(run)
    assert run("backup", "verify", point[:8]).exit_code == 0
    assert run("backup", "protect", point[:8]).stdout == f"Restore point {point} is protected\n"
    assert run("backup", "remove-point", point[:8]).exit_code == 1
    assert run("backup", "unprotect", point[:8]).exit_code == 0
    none = run("backup", "run", "weekly")
    assert (none.exit_code, "there is no backup job weekly" in none.stderr) == (1, True)


def test_a_job_is_changed_shown_and_removed(run: Run, job: str) -> None:
    assert "There are no runs" in run("backup", "runs").stdout
    changed = run(
        "backup", "change-job", "nightly", "--schedule", "0 2 * * *", "--keep-daily", "7", "--vm", "web", "--vm", "db", "--json"
    )
    answer = json.loads(changed.stdout)
    assert (answer["schedule"], answer["vm_ids"]) == ("0 2 * * *", ["web", "db"])
    assert {line: count for line, count in answer["retention"].items() if count is not None} == {"keep_daily": 7}
    table = run("backup", "jobs").stdout
    for part in ("nightly: web, db", "0 2 * * *", answer["next_run_at"][:10]):
        assert part in table
    assert json.loads(run("backup", "change-job", job, "--schedule", "never", "--json").stdout)["next_run_at"] is None
    wrong = run("backup", "change-job", job, "--schedule", "at night")
    assert (wrong.exit_code, "E_BAK_BAD_REQUEST: schedule" in wrong.stderr) == (2, True)
    assert run("backup", "remove-job", "nightly").stdout == f"Backup job {job} is removed; its restore points stay\n"
    assert "There are no jobs" in run("backup", "jobs").stdout
    assert run("backup", "forget-repository", "here").exit_code == 0
    assert "There are no repositories" in run("backup", "repositories").stdout


def test_times_are_by_this_hosts_clock_as_everywhere(run: Run, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert run("backup", "change-job", "nightly", "--schedule", "0 2 * * *").exit_code == 0
        listed = run("backup", "jobs").stdout
        added = run("backup", "add-job", "db", "--name", "other", "--repository", "here", "--schedule", "0 2 * * *").stdout
    finally:
        monkeypatch.undo()
        time.tzset()
    for text in (listed, added):
        assert " 11:00" in text
        assert "UTC" not in text


def test_the_oldest_run_under_way_is_watched_however_many_have_ended_since(service: Service, run: Run, job: str) -> None:
    held = threading.Event()
    service.guests.gate = lambda: held.wait(WAIT_S)
    under_way = service.backups.run_job(UUID(job))
    done = under_way.model_copy(update={"status": Status.COMPLETED, "finished_at": now(), "created_at": now()})
    rows = [Row("run", one, done.model_copy(update={"id": one}), str(done.status)) for one in (uuid4() for _ in range(1001))]
    service.store.backups.put_all(rows, host="local")
    threading.Timer(0.5, held.set).start()
    watched = run("backup", "watch")
    assert (watched.exit_code, str(under_way.id)[:8] in watched.stdout) == (0, True), watched.stdout


def test_retention_says_what_goes_and_why_the_rest_stays(service: Service, run: Run, job: str) -> None:
    points = []
    for number in range(3):
        service.guests.image("web", bytes([number + 1]) * 100)
        points.append(_point(run))
    run("backup", "protect", points[0])
    would = run("backup", "retention", "nightly", "--keep-last", "1")
    lines = would.stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == points[::-1]
    assert [line.split(":", 2)[-1].strip() if "stays" in line else line.split()[-1] for line in lines] == [
        "last",
        "goes",
        "protected",
    ]
    wrong = run("backup", "retention", "nightly", "--keep-last", "1", "--apply")
    assert wrong.exit_code == 2
    run("backup", "change-job", "nightly", "--keep-last", "1")
    applied = run("backup", "retention", "nightly", "--apply", "--json")
    assert [one["removed"] for one in json.loads(applied.stdout)["items"]] == [False, True, False]
    assert len(json.loads(run("backup", "points", "--json").stdout)["items"]) == 2


def test_a_limit_of_what_is_read_a_second(run: Run, job: str) -> None:
    def limit() -> int | None:
        (found,) = json.loads(run("backup", "jobs", "--json").stdout)["items"]
        return cast("int | None", found["bandwidth_bps"])

    run("backup", "change-job", "nightly", "--bandwidth", "50MiB")
    assert limit() == 50 << 20
    run("backup", "change-job", "nightly", "--name", "nightly")
    assert limit() == 50 << 20
    run("backup", "change-job", "nightly", "--bandwidth", "none")
    assert limit() is None
    assert run("backup", "change-job", "nightly", "--bandwidth", "fast").exit_code == 2


def test_a_repository_is_looked_after(run: Run, job: str, home: Path) -> None:
    _point(run)
    whole = run("backup", "verify-repository", "here")
    assert (whole.exit_code, "1 packs and 1 restore points" in whole.stdout) == (0, True)
    counted = run("backup", "collect", "here", "--dry-run")
    assert (counted.exit_code, "0 B in 0 packs are removed" in counted.stdout) == (0, True)
    (pack,) = (home / "packs").iterdir()
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)
    damaged = run("backup", "verify-repository", "here")
    assert (damaged.exit_code, "E_BAK_DAMAGED" in damaged.stderr) == (1, True)
    assert "damaged" in run("backup", "points").stdout


def test_the_list_says_why_a_repository_cannot_be_used(run: Run, job: str, home: Path) -> None:
    home.rename(home.with_name("elsewhere"))
    listed = run("backup", "repositories").stdout
    assert "unreachable" in listed
    assert f"here: there is no folder {home}" in listed


def test_a_run_that_fails_says_why_and_exits_1(service: Service, run: Run, job: str) -> None:
    service.guests.remove("web")
    done = run("backup", "run", "nightly")
    assert done.exit_code == 1
    assert "E_BAK_NOT_FOUND: this host has no domain web" in done.stderr
    assert "failed" in run("backup", "runs").stdout


def test_json_is_what_the_service_answers(service: Service, run: Run, job: str) -> None:
    ran = json.loads(run("backup", "run", "nightly", "--json").stdout)
    assert (ran["status"], ran["job_id"]) == ("completed", job)
    watched = [json.loads(line) for line in run("backup", "watch", ran["id"], "--json").stdout.splitlines()]
    assert watched[-1] == ran
    for listing in ("repositories", "jobs", "runs", "points"):
        page = json.loads(run("backup", listing, "--json", "--limit", "1").stdout)
        assert (len(page["items"]), page["next_cursor"]) == (1, None)
    assert json.loads(run("backup", "protect", ran["restore_point_ids"][0], "--json").stdout)["protected"] is True


class Held:
    """Runs of this service stop where they open their guest, until let go."""

    def __init__(self, service: Service) -> None:
        self.opened, self._go = threading.Event(), threading.Event()
        service.guests.gate = self._gate

    def _gate(self) -> None:
        self.opened.set()
        assert self._go.wait(WAIT_S)

    def let_go(self) -> None:
        self._go.set()


def _started(service: Service, *arguments: str, **kind: Any) -> "subprocess.Popen[str]":
    argv = [*SYNVIRT, "--data-dir", service.settings.data_dir, "backup", *arguments]
    return subprocess.Popen(argv, text=True, **kind)


@pytest.mark.parametrize("command", ["run", "watch"])
def test_ctrl_c_leaves_the_run_going_and_says_how_to_watch_it_again(service: Service, job: str, command: str) -> None:
    held = Held(service)
    arguments = ["run", "nightly"]
    if command == "watch":
        run_id = service.backups.run_job(service.backups.jobs(limit=1, cursor=None)[0][0].id).id
        arguments = ["watch"]
    child = _started(service, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert held.opened.wait(WAIT_S)
    assert " backup " in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=WAIT_S)
    (found,), _ = service.backups.runs.page(limit=9, cursor=None)
    assert command == "run" or found.id == run_id
    assert (child.returncode, err) == (130, "")
    assert out.splitlines()[-1] == f"The run goes on. Watch it again: synvirt backup watch {found.id}"
    held.let_go()
    assert ended(service.backups, found.id).status == "completed"


def test_a_run_is_cancelled_and_watching_it_exits_1(service: Service, run: Run, job: str) -> None:
    held = Held(service)
    child = _started(service, "run", "nightly", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert held.opened.wait(WAIT_S)
    (found,), _ = service.backups.runs.page(limit=9, cursor=None)
    assert run("backup", "cancel", str(found.id)[:8]).stdout == f"Run {found.id} is asked to stop\n"
    held.let_go()
    _, err = child.communicate(timeout=WAIT_S)
    assert (child.returncode, err.split(":")[0]) == (1, "E_BAK_CANCELLED")
    assert run("backup", "watch").stdout == "No run is under way\n"
    assert run("backup", "cancel", found.id).exit_code == 1


def test_a_bar_on_a_terminal(service: Service, job: str) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with _started(service, "run", "nightly", stdout=theirs, env=environment) as child:
        os.close(theirs)
        screen, until = b"", time.monotonic() + WAIT_S
        while time.monotonic() < until:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    screen += os.read(ours, 65536)
                except OSError:  # the other side is closed
                    break
            elif child.poll() is not None:
                break
        assert child.wait(WAIT_S) == 0
    os.close(ours)
    for part in ("completed", "━", "100 %, 3.0 MiB of 3.0 MiB", "restore point"):
        assert part in screen.decode()


def test_the_tables_fit_80_columns(run: Run, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run("backup", "change-job", "nightly", "--schedule", "*/15 8-18 * * mon-fri")
    run("backup", "protect", _point(run))
    for noun, table in (
        ("repositories", backup_repositories._repositories),
        ("jobs", backup_jobs._jobs),
        ("runs", commands._runs),
        ("points", commands._points),
    ):
        items = json.loads(run("backup", noun, "--json").stdout)["items"]
        assert _width(monkeypatch, table, items) <= 80
    fates = json.loads(run("backup", "retention", "nightly", "--json").stdout)["items"]
    assert _width(monkeypatch, backup_jobs._fates, fates) <= 80


def _width(monkeypatch: pytest.MonkeyPatch, table: Any, items: list[Any]) -> int:
    console = Console(width=80, record=True, color_system=None, force_terminal=True, quiet=False)
    with monkeypatch.context() as patched:
        patched.setattr("rich.console.Console", lambda **_: console)
        table(items)
    lines = console.export_text().splitlines()
    for item in items:
        assert any((item.get("id") or item["restore_point_id"])[:8] in line for line in lines), lines
    assert not any("…" in line for line in lines), lines
    return max(len(line.rstrip()) for line in lines)
