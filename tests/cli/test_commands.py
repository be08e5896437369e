"""What each command prints and how it exits, against a real service."""

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from operator import methodcaller
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from typer.testing import CliRunner

from synvirt.api.listening import ELSEWHERE
from synvirt.cli.client import Client
from synvirt.cli.listing import at, full_id
from synvirt.cli.migrating import importing
from synvirt.cli.options import SHARED, Options
from synvirt.cli.program import shown
from synvirt.errors import OutageTooLong
from synvirt.main import app  # `main` adds serve and demo; tests put the program together once
from synvirt.model.job import DiskProgress, Forecast, Pass, Progress
from synvirt.model.kinds import LiveKind, Mode, OfflineKind, State
from synvirt.model.plan import HostPathRef, LiveVmRef, PlanSource, Warm
from synvirt.model.problems import Problem
from synvirt.model.values import now
from synvirt.sizes import MIB
from tests.api.test_health import finding
from tests.cli.conftest import Run
from tests.fakes.service import PASSWORD, PLAN, USER, Service, failed
from tests.house import live_plan


def test_help_waits_for_nothing() -> None:
    """Slow modules are loaded when a command runs, not before."""
    slow = {"pydantic", "httpx", "fastapi", "rich", "sqlalchemy"}
    code = f"import sys, synvirt.main; print(*sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["migrations", "--help"], ["import", "--help"], ["migrations", "watch", "--help"]]
)
def test_help(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.exit_code == 0
    assert "Usage:" in done.stdout


def test_the_list_of_commands_says_of_each_in_a_line_what_it_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = run("--help").stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed[:5]] == ["demo", "serve", "doctor", "inspect", "import"]
    assert [line for line in listed if line.endswith("...")] == []


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_where_a_service_listens_is_an_option_of_each_that_starts_one(command: str, run: Run) -> None:
    """An address in use is refused with a hint, which both of them can follow."""
    option = next(word for word in ELSEWHERE.split() if word.startswith("--"))
    assert option in run(command, "--help").stdout


def test_the_version(run: Run) -> None:
    assert run("--version").stdout.startswith("synvirt 0.")


def test_the_kinds_are_the_models() -> None:
    assert set(importing.KINDS) == {str(kind) for kind in OfflineKind}


def test_every_shared_option_is_an_option_of_options() -> None:
    assert list(SHARED) == list(Options.__dataclass_fields__)


# ── no service ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arguments", [["migrations", "list"], ["migrations", "watch", str(UUID(int=1))]])
def test_no_service_says_how_to_start_one(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"no service answers at {tmp_path}/synvirt.sock" in done.stderr
    assert f"hint: start it: synvirt serve --data-dir {tmp_path}" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["migrations", "list", "--limit", "0"],
        ["import"],
        ["import", "x.ova", "--mode", "tepid"],
        ["import", "x.ova", "--kind", "floppy"],
        ["migrations", "show"],
        ["--server", "gopher://x", "migrations", "list"],
        ["--server", "http://192.0.2.1", "migrations", "list"],
        ["--server", "https://192.0.2.1", "--cacert", "/nonexistent", "migrations", "list"],
        ["--server", "https://192.0.2.1", "import", "relative.ova"],
    ],
    ids=" ".join,
)
def test_wrong_usage(run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setenv("SYNVIRT_PASSWORD", "x")
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["waves", "import", "/nosuch.json"],
        ["migrations", "dry-run", "/nosuch.json"],
        ["--server", "https://192.0.2.1", "--cacert", "/nosuch.pem", "migrations", "list"],
    ],
    ids=" ".join,
)
def test_a_file_that_is_not_there_is_said_without_pythons_words(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("SYNVIRT_PASSWORD", "x")
    done = run(*arguments)
    assert (done.exit_code, "cannot be read: No such file or directory" in done.stderr) == (2, True), done.stderr
    assert "Errno" not in done.stderr


def test_a_wrong_setting_is_wrong_usage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNVIRT_JOBS_AT_ONCE", "many")
    done = run("migrations", "list")
    assert done.exit_code == 2
    assert "E_MIG_BAD_REQUEST: setting jobs_at_once" in done.stderr


def test_what_is_unexpected_is_reported_without_a_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise ValueError("surprise")

    monkeypatch.setattr(Options, "connect", broken)
    done = run("migrations", "list")
    assert done.exit_code == 1
    assert done.stderr.startswith("E_MIG_INTERNAL: something unexpected went wrong in this command: ValueError: surprise")
    assert "Traceback" not in done.output


# ── migrations ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_list(service: Service, run: Run) -> None:
    assert run("migrations", "list").stdout == "There are no migrations\n"


def test_list(service: Service, run: Run) -> None:
    first, second = service.submit(), service.submit()
    service.move(first.id, State.COPYING_FULL)
    service.board.pin(first.id, State.COPYING_FULL, Progress(bytes_total=4 << 30, bytes_done=1 << 30))
    lines = run("migrations", "list").stdout.splitlines()
    assert lines[0].split() == ["ID", "NAME", "STATE", "DONE", "CREATED"]
    assert lines[1].startswith(f"{second.id}  web.ova  Queued")
    assert lines[2].startswith(f"{first.id}  web.ova  CopyingFull  1.0 GiB of 4.0 GiB")
    page = run("migrations", "list", "--limit", "1").stdout
    assert str(first.id) not in page
    cursor = page.split("--cursor ")[1].strip()
    assert str(first.id) in run("migrations", "list", "--cursor", cursor).stdout


def test_a_list_names_the_hosts_where_there_are_several(service: Service, run: Run) -> None:
    first = service.submit()
    service.store.add(first.model_copy(update={"id": uuid4(), "name": "db01", "host": "kvm-b"}), host="kvm-b")
    titles, *lines = run("migrations", "list").stdout.splitlines()
    assert titles.split() == ["ID", "NAME", "STATE", "HOST", "DONE", "CREATED"]
    assert [line.split()[1:4] for line in lines] == [["db01", "Queued", "kvm-b"], ["web.ova", "Queued", "local"]]


def test_a_job_of_which_this_version_knows_little_is_listed(
    service: Service, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, later_id = service.submit(), str(uuid4())
    answer = {"items": [{"id": later_id, "later": 1}, known.model_dump(mode="json")], "next_cursor": None}
    monkeypatch.setattr(Client, "ask", lambda *_, **__: json.dumps(answer))
    later, job = run("migrations", "list").stdout.splitlines()[1:]
    assert later.split() == [later_id, "?", "?"]
    assert job.startswith(str(known.id))


@pytest.mark.parametrize("place", ["before", "after"])
def test_json_is_exactly_what_the_service_answers(service: Service, run: Run, place: str) -> None:
    job = service.submit()
    with service.local() as client:
        for path, command in (("/migrations", ["list"]), (f"/migrations/{job.id}", ["show", str(job.id)])):
            arguments = ["--json", "migrations", *command] if place == "before" else ["migrations", *command, "--json"]
            assert run(*arguments).stdout == client.get(path).text + "\n"


def test_an_option_after_the_command_wins(service: Service, tmp_path: Path) -> None:
    service.submit()
    done = CliRunner().invoke(app, ["--data-dir", "/nonexistent", "migrations", "list", "--data-dir", str(tmp_path)])
    assert "web.ova" in done.stdout


def test_a_flag_wins_over_the_environment(service: Service, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    service.submit()
    monkeypatch.setenv("SYNVIRT_DATA_DIR", "/nonexistent")
    assert "web.ova" in run("migrations", "list").stdout
    monkeypatch.setenv("SYNVIRT_DATA_DIR", str(tmp_path))
    assert "web.ova" in CliRunner().invoke(app, ["migrations", "list"]).stdout


def test_show(service: Service, run: Run) -> None:
    job = service.submit()
    service.move(job.id, State.FAILED, error=failed())
    reported = run("migrations", "show", job.id).stdout
    for part in (str(job.id), "Failed", "E_MIG_DISK_WRITE_FAILED: the disk is full", "make room", "Queued"):
        assert part in reported


@pytest.mark.parametrize("field", ["retry_of", "retried_by", "restart_of", "restarted_by"])
def test_show_names_the_jobs_before_and_after_it(service: Service, run: Run, field: str) -> None:
    other = uuid4()
    job = service.submit().model_copy(update={"id": uuid4(), field: other})
    service.store.add(job, host="local")
    (line,) = [line for line in run("migrations", "show", job.id).stdout.splitlines() if str(other) in line]
    assert line.startswith("job ")


@pytest.mark.parametrize(("ttl_s", "is_lost"), [(-5, True), (600, False)])
def test_show_says_that_the_host_of_a_job_is_lost(service: Service, run: Run, ttl_s: float, is_lost: bool) -> None:
    """Its last figures are of the moment before: nothing is copied any more."""
    service.store.hosts.begin("kvm2", ttl_s=ttl_s, document="{}")
    progress = Progress(bytes_total=100 << 20, bytes_done=50 << 20, rate_bps=5 << 20, eta_s=10)
    job = service.submit().model_copy(update={"id": uuid4(), "host": "kvm2", "state": State.COPYING_FULL, "progress": progress})
    service.store.add(job, host="kvm2")
    reported = run("migrations", "show", job.id).stdout
    assert ("kvm2 (away: the job waits for it" in reported, "5.0 MiB/s, 10 s to go" in reported) == (is_lost, not is_lost)


def test_show_of_a_warm_job_has_its_passes_its_forecast_and_the_result(service: Service, run: Run) -> None:
    job = service.submit(live_plan(warm={"cutover": "manual"}))
    forecast = Forecast(
        change_rate_bps=MIB,
        throughput_bps=8 * MIB,
        expected_delta_bytes=3 * MIB,
        expected_downtime_s=1.25,
        converges=True,
        at=now(),
    )
    passes = (
        Pass(number=1, kind="full", bytes=80 * MIB, seconds=9.96, finished_at=now()),
        Pass(number=2, kind="delta", bytes=4 * MIB, seconds=1, whole=True),
    )

    def copied(state: State, **fields: object) -> str:
        before = service.store.get(job.id).state
        update = {"state": state, "mode_effective": Mode.WARM, "passes": passes, "forecast": forecast, **fields}
        service.store.change(job.id, before, lambda one: one.model_copy(update=update))
        return str(run("migrations", "show", job.id).stdout)

    reported = copied(State.DELTA_SYNCING)
    for part in (
        "pass     1 full: 80.0 MiB in 10.0 s\n",
        "pass     2 delta: 4.0 MiB in 1.0 s, whole disks compared, under way\n",
        "1.0 MiB/s change; a cut-over copies 3.0 MiB, in 1.2 s beside shutting down and starting",
        f"synvirt migrations cutover {job.id}",
    ):
        assert part in reported
    reported = copied(State.DELTA_SYNCING, forecast=forecast.model_copy(update={"converges": False}))
    assert "1.0 MiB/s change, 8.0 MiB/s are copied: it will not become less" in reported
    many = tuple(Pass(number=number, kind="delta", bytes=MIB, seconds=1, finished_at=now()) for number in range(1, 2001))
    reported = copied(State.DELTA_SYNCING, passes=many)
    numbers = [line.split()[1] for line in reported.splitlines() if line.startswith("pass ")]
    assert numbers == ["1", "…", *map(str, range(1992, 2001))]
    assert "… 1990 more" in reported
    disk = DiskProgress(key="disk0", label="system", state="copying", bytes_total=100 * MIB, bytes_done=50 * MIB)
    assert " disk0 system: copying," in copied(State.DELTA_SYNCING, disks=(disk,))
    for part in (" disk0 system: stopped,", " 2 delta: 4.0 MiB in 1.0 s, whole disks compared, stopped\n"):
        assert part in copied(State.CANCELLED)
    reported = copied(State.COMPLETED, downtime_s=9.342)
    assert "downtime 9.3 s\n" in reported
    assert "forecast" not in reported
    assert "held" not in reported


def test_show_says_what_a_job_that_was_asked_to_cut_over_waits_for(service: Service, run: Run) -> None:
    job = service.submit(live_plan(warm={"cutover": "manual"}))
    under_way = Pass(number=1, kind="full")
    finished = under_way.model_copy(update={"finished_at": now()})
    too_long = Problem(
        code=OutageTooLong.code, message="it may take 9 s", hint=None, fatal=False, at=now(), state=State.DELTA_SYNCING
    )
    service.store.request_cutover(job.id)
    for state, fields, words in (
        (State.COPYING_FULL, {"passes": (under_way,)}, "until its present pass has ended; it was asked to cut over"),
        (State.DELTA_SYNCING, {"passes": (finished,)}, "until it has a slot for its next pass; it was asked to cut over"),
        (State.DELTA_SYNCING, {"last_error": too_long}, "until its outage is short enough; it was asked to cut over"),
        (State.DELTA_SYNCING, {"cutover_request": None}, f"until it is asked to cut over: synvirt migrations cutover {job.id}"),
    ):
        update = {"state": state, "mode_effective": Mode.WARM, **fields}
        service.store.change(job.id, service.store.get(job.id).state, methodcaller("model_copy", update=update))
        assert f"held     {words}\n" in run("migrations", "show", job.id).stdout


def test_show_says_what_a_sample_would_have_seen_and_what_a_source_lost(service: Service, run: Run) -> None:
    job = service.submit(live_plan(warm={"confidence": 0.99}))
    lost = f"the source called 4096 bytes at offset {5 * MIB} unchanged, and they have changed"
    sampled = Pass(number=2, kind="delta", seconds=1, bytes_checked=MIB // 4, would_see=0.134, finished_at=now())
    compared = sampled.model_copy(update={"number": 3, "bytes_checked": 80 * MIB, "verify": True, "would_see": 0.0})
    update = {"mode_effective": Mode.WARM, "passes": (sampled, compared), "distrusted": lost}
    service.store.change(job.id, State.QUEUED, lambda one: one.model_copy(update=update))
    reported = run("migrations", "show", job.id).stdout
    assert "256 KiB of the unchanged compared (sees with 99 % certainty that 13.40% or more were lost)\n" in reported
    assert "80.0 MiB of the unchanged compared (all)\n" in reported
    assert ["lost", lost] in [line.split(maxsplit=1) for line in reported.splitlines()]


def test_the_beginning_of_an_id_is_enough(service: Service, run: Run) -> None:
    job = service.submit()
    assert str(job.id) in run("migrations", "show", str(job.id)[:8]).stdout
    missing = run("migrations", "show", "zzz")
    assert (missing.exit_code, missing.stderr.splitlines()[0]) == (1, "E_MIG_NOT_FOUND: there is no migration zzz")
    for _ in range(40):
        service.submit()
    ambiguous = [run("migrations", "show", digit) for digit in "0123456789abcdef"]
    assert any(done.exit_code == 2 and "migrations match" in done.stderr for done in ambiguous)


def test_a_jobs_name_is_enough(service: Service, run: Run) -> None:
    job = service.submit()
    assert str(job.id) in run("migrations", "show", job.name).stdout
    assert f"did you mean {job.name}?" in run("migrations", "show", job.name[:-1] + "b").stderr
    service.submit()
    several = run("migrations", "show", job.name)
    assert (several.exit_code, "2 migrations match" in several.stderr) == (2, True)


def test_a_beginning_is_looked_for_on_every_page() -> None:
    class Paged:
        """Each page has one job."""

        def ask(self, method: str, path: str, *, params: dict[str, str | None]) -> str:
            number = int(params["cursor"] or 0)
            items = [{"id": str(UUID(int=number << 96)), "name": "web"}]
            return json.dumps({"items": items, "next_cursor": str(number + 1) if number < 3 else None})

    assert full_id(Paged(), "migration", "00000003") == str(UUID(int=3 << 96))


@pytest.mark.parametrize(("zone", "shown_"), [("UTC", "2026-11-25 23:30:00"), ("Asia/Tokyo", "2026-11-26 08:30:00")])
def test_times_are_by_the_clock_of_who_reads_them(monkeypatch: pytest.MonkeyPatch, zone: str, shown_: str) -> None:
    """As the lines of a job that is watched: a list in another zone's time looked wrong beside them."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert at("2026-11-25T23:30:00.123456Z") == at(datetime(2026, 11, 25, 23, 30, tzinfo=UTC)) == shown_
        assert at("") == ""
    finally:
        monkeypatch.undo()
        time.tzset()


def test_cancel_and_cutover(service: Service, run: Run) -> None:
    job = service.submit()
    assert "is asked to stop" in run("migrations", "cancel", job.id).stdout
    assert service.store.cancel_requested(job.id)
    refused = run("migrations", "cutover", job.id)
    assert (refused.exit_code, refused.stderr.splitlines()[0].split(":")[0]) == (1, "E_MIG_CONFLICT")
    service.move(job.id, State.CANCELLED)
    again = run("migrations", "cancel", job.id)
    assert (again.exit_code, again.stderr.split(":")[0]) == (1, "E_MIG_CONFLICT")
    waiting = service.submit(
        PLAN.model_copy(
            update={
                "source": PlanSource(Live=LiveKind.VIM_API),
                "source_ref": LiveVmRef(kind="live_vm", source_id=UUID(int=1), vm_id="vm-1"),
                "mode": Mode.WARM,
                "warm": Warm(cutover="manual"),
            }
        )
    )
    assert json.loads(run("migrations", "cutover", waiting.id, "--json").stdout)["id"] == str(waiting.id)


def test_a_name_from_an_archive_cannot_command_the_terminal(service: Service, run: Run) -> None:
    evil = "evil\x9b31m\u202e[bold]name"
    service.submit(PLAN.model_copy(update={"name": evil}))
    reported = run("migrations", "list").stdout
    assert "evil\ufffd31m\ufffd[bold]name" in reported
    assert shown("a\x1b[31mb\nc\td") == "a\ufffd[31mb\nc\ufffdd"


# ── import and inspect ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def ova(tmp_path: Path) -> Path:
    """In the import root; what is in it does not matter where --kind is given."""
    (tmp_path / "imports").mkdir(exist_ok=True)
    path = tmp_path / "imports" / "web.ova"
    path.write_bytes(b"nothing")
    return path


@pytest.mark.parametrize("how", ["absolute", "inside", "here"])
def test_import_finds_the_file(service: Service, run: Run, ova: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "here":
        monkeypatch.chdir(ova.parent.parent)
    given = {"absolute": str(ova), "inside": "web.ova", "here": "imports/web.ova"}[how]
    done = run("import", given, "--kind", "ova_archive", "--name", "www")
    [begun] = service.begun
    assert (done.exit_code, done.stdout) == (0, f"Job {begun} is queued. Watch it: synvirt migrations watch {begun}\n")
    plan = service.store.get(begun).plan
    assert plan.source_ref == HostPathRef(kind="offline_host_path", path=str(ova))
    assert (plan.source.Offline, plan.mode, plan.target.name) == (OfflineKind.OVA_ARCHIVE, Mode.COLD, "www")


def test_import_prints_the_job_as_json(service: Service, run: Run, ova: Path) -> None:
    done = run("import", ova, "--kind", "qcow2", "--mode", "warm", "--json")
    job = service.store.get(service.begun[0])
    assert json.loads(done.stdout) == json.loads(job.model_dump_json())
    assert job.plan.mode == Mode.WARM


def test_import_maps_networks_and_gives_a_copy_an_identity_of_its_own(service: Service, run: Run, ova: Path) -> None:
    given = ["import", str(ova), "--kind", "ova_archive"]
    assert run(*given, "--network", "VM = Network=bridge:br0", "--network", "lan=user", "--new-identity").exit_code == 0
    assert run(*given).exit_code == 0
    copy, original = (service.store.get(begun).plan.target for begun in service.begun)
    assert [(one.source, one.target) for one in copy.network_map] == [("VM = Network", "bridge:br0"), ("lan", "user")]
    assert (copy.identity, original.identity, original.network_map) == ("new", "keep", ())
    for wrong in ("lan", "=br0", "lan="):
        assert run(*given, "--network", wrong).exit_code == 2


def test_import_of_what_it_does_not_know(service: Service, run: Run, ova: Path) -> None:
    for arguments, code in (
        (["import", ova], "E_MIG_UNSUPPORTED_FORMAT"),
        (["import", "missing.ova"], "E_MIG_NOT_FOUND"),
        (["import", ova.parent / "missing.ova"], "E_MIG_NOT_FOUND"),
        (["import", "/etc/passwd"], "E_MIG_HOST_PATH_REJECTED"),
    ):
        done = run(*arguments)
        assert (done.exit_code, done.stderr.split(":")[0]) == (1, code), done.stderr
    assert service.begun == []


def test_inspect_refuses_with_a_cause(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"nothing")
    done = run("inspect", tmp_path / "x.bin")
    assert (done.exit_code, done.stderr.split(":")[0]) == (1, "E_MIG_UNSUPPORTED_FORMAT")


# ── password ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_password(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from synvirt.accounts import FileAccounts

    first = run("password", "eve", typed="a first one\n").stdout
    assert first == "The password of eve is set\neve is a new account, with the role admin\n"
    assert run("password", "eve", typed="a new one\n").stdout == "The password of eve is set\n"
    FileAccounts(tmp_path / "keyring" / "users")("eve", "a new one", "")
    mistyped = run("password", "evw", typed="a new one\n").stdout.splitlines()[1]
    assert mistyped == "evw is a new account, with the role operator; if that is not meant: synvirt accounts remove evw"
    assert run("password", "eve", typed="\n").exit_code == 2
    monkeypatch.setenv("SYNVIRT_AUTH", "pam")
    assert "host's own accounts" in run("password", "eve", typed="x\n").stderr


# ── over HTTPS ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_service_elsewhere(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(tmp_path)
    service.submit()
    certificate = tmp_path / "keyring" / "tls.crt"
    with service.served() as server:
        elsewhere = ["migrations", "list", "--server", server.address, "--user", USER]
        assert "web.ova" in run(*elsewhere, "--cacert", certificate, typed=f"{PASSWORD}\n").stdout, "the password is asked for"
        monkeypatch.setenv("SYNVIRT_PASSWORD", PASSWORD)
        assert "web.ova" in run(*elsewhere, "--cacert", certificate).stdout
        assert "web.ova" in run(*elsewhere, "--insecure").stdout
        untrusted = run(*elsewhere)
        assert (untrusted.exit_code, "--cacert" in untrusted.stderr) == (1, True)
        assert "CERTIFICATE_VERIFY_FAILED" in untrusted.stderr
        monkeypatch.setenv("SYNVIRT_PASSWORD", "wrong")
        refused = run(*elsewhere, "--cacert", certificate)
        assert (refused.exit_code, refused.stderr.split(":")[0]) == (1, "E_MIG_UNAUTHENTICATED")
        monkeypatch.setenv("SYNVIRT_PASSWORD", PASSWORD)
        doctor = ["doctor", *elsewhere[2:], "--cacert", certificate]
        not_yet = run(*doctor)
        assert (not_yet.exit_code, "shows no checks" in not_yet.stderr) == (1, True)
        service.checkup = (now(), [finding("zpool", found=True), finding("qemu", found=False, needed=True)])
        found = run(*doctor)
        assert (found.exit_code, "zpool" in found.stdout, "MISSING  qemu" in found.stdout) == (1, True, True)
        assert json.loads(run(*doctor, "--json").stdout)["ok"] is False
    gone = run(*elsewhere, "--insecure")
    assert (gone.exit_code, f"no service answers at {server.address}" in gone.stderr) == (1, True)
    service.close()
