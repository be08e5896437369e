"""A plan before it does anything, errors as JSON, and the API's words as this command's options."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.cli.migrating.dry_runs import as_options, patch_of
from synvirt.errors import BadRequest, Conflict
from synvirt.kvm.identity import CLASH_HINT
from synvirt.machines import concerns
from synvirt.migrations.planning.foreseen import DiskWay, DryRun, PlanForecast, PlanProblem
from synvirt.model.job import Difference, Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.machine import VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import now
from tests.cli.conftest import Run
from tests.fakes.service import PLAN, Service, failed

PROBLEM = PlanProblem(field="target.network_map[0].target", detail="there is no network", hint="did you mean bridge:br0?")


def answered(plan: MigrationPlan) -> DryRun:
    """Plans called `right` have no problem."""
    return DryRun(
        plan=plan,
        manifest=VmManifest(vm_id="web", name="web"),
        concerns=(),
        ways=(DiskWay(disk_key="disk0", way="file", reason="read where it lies, as vmdk"),),
        forecast=PlanForecast(bytes_to_read=1 << 30, copy_s=12, outage_p50_s=3, outage_p95_s=9, basis="2 jobs"),
        differences=(Difference(what="memory", source="1 GiB", here="2 GiB", why="asked for"),),
        problems=() if plan.name == "right" else (PROBLEM,),
    )


def refused(plan: MigrationPlan) -> None:
    raise Conflict("the name is taken", hint=CLASH_HINT)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path, has_pages=False, dry_run=answered, check=refused)
    with made.served():
        yield made
    made.close()


def test_a_failed_job_is_tried_again_with_what_was_wrong_corrected(tmp_path: Path, run: Run) -> None:
    made = Service(tmp_path, has_pages=False)
    with made.served():
        job = made.submit(PLAN)
        assert "only a failed job" in run("migrations", "retry", job.id).stderr
        made.move(job.id, State.FAILED, error=failed())
        done = run(
            "migrations", "retry", job.id, "--set", "target.start=false", "--set", "target.name=web2", "--disk-bus", "sata"
        )
        assert (done.exit_code, done.stdout.endswith(" starts over\n")) == (0, True), done.stderr
        again = made.store.get(made.begun[-1])
        assert again.plan.target == PLAN.target.model_copy(update={"start": False, "name": "web2", "disk_bus": "sata"})
        wrong = run("migrations", "retry", job.id, "--set", "target.nmae=web2")
        assert "plan.target.nmae" in wrong.stderr
    made.close()


@pytest.mark.parametrize("changes", [["target.name"], ["=x"], ["target=1", "target.name=x"], ["a..b=1"]])
def test_a_correction_is_a_field_and_its_value(changes: list[str]) -> None:
    with pytest.raises(BadRequest, match="--set"):
        patch_of(changes)


def test_a_plan_in_a_file_is_dry_run_and_makes_no_job(service: Service, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"plan": PLAN.model_dump(mode="json")}))
    done = run("migrations", "dry-run", file)
    assert done.exit_code == 1
    assert "disk0: file" in done.stdout
    assert "1.0 GiB to read, about 12 s; the guest is off for 3 s, 9 s at p95 (2 jobs)" in done.stdout
    assert "memory: 1 GiB → 2 GiB (asked for)" in done.stdout
    assert "problem  --network: there is no network; did you mean bridge:br0?" in done.stdout
    assert json.loads(run("--json", "migrations", "dry-run", file).stdout)["problems"] == [PROBLEM.model_dump()]
    file.write_text(PLAN.model_copy(update={"name": "right"}).model_dump_json())
    done = run("migrations", "dry-run", file)
    assert (done.exit_code, "nothing is wrong with it" in done.stdout) == (0, True)
    assert service.store.documents(limit=1)[0] == []
    assert service.begun == []


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[]", "is no object of JSON"), ('{"plan": 1}', "holds no plan"), (None, "cannot be read")],
)
def test_a_file_that_holds_no_plan(service: Service, run: Run, tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "plan.json"
    if content is not None:
        file.write_text(content)
    done = run("migrations", "dry-run", file)
    assert (done.exit_code, message in done.stderr) == (2, True)


def test_import_dry_runs_too(service: Service, run: Run) -> None:
    (service.settings.imports_dir / "web.qcow2").write_bytes(b"not looked at: name its kind with --kind")
    arguments = ("import", "web.qcow2", "--kind", "qcow2", "--dry-run")
    done = run(*arguments)
    assert (done.exit_code, "--network: there is no network" in done.stdout) == (1, True)
    assert run(*arguments, "--name", "right").exit_code == 0
    plan = json.loads(run("--json", *arguments, "--conversion", "never").stdout)["plan"]
    assert plan["conversion"] == "never"
    assert run(*arguments, "--conversion", "sometimes").exit_code == 2
    assert service.begun == []


def test_a_refusal_speaks_of_options(service: Service, run: Run) -> None:
    (service.settings.imports_dir / "web.qcow2").write_bytes(b"not looked at")
    done = run("import", "web.qcow2", "--kind", "qcow2")
    assert done.exit_code == 1
    assert "give --new-identity and give the copy a name in --name" in done.stderr
    assert "target." not in done.stderr


@pytest.mark.parametrize("further", [(), ("--dry-run",)])
def test_a_value_that_no_plan_may_have_is_reported_by_its_option(service: Service, run: Run, further: tuple[str, ...]) -> None:
    (service.settings.imports_dir / "web.qcow2").write_bytes(b"not looked at")
    done = run("import", "web.qcow2", "--kind", "qcow2", "--memory", "4000TiB", *further)
    assert done.exit_code == 1
    assert "E_MIG_INVALID_PLAN: --memory: must be" in done.stderr
    assert "hint: --help says what this command takes" in done.stderr
    done = run("import", "web.qcow2", "--kind", "qcow2", "--start-at", "soon", *further)
    assert "--start-at: must be a time: 2026-11-28T22:00:00+01:00, for example" in done.stderr


def test_a_mistake_of_an_option_that_sets_two_fields_is_reported_once(service: Service, run: Run) -> None:
    (service.settings.imports_dir / "web.qcow2").write_bytes(b"not looked at")
    done = run("import", "web.qcow2", "--kind", "qcow2", "--name", "")
    assert done.stderr.splitlines()[0] == "E_MIG_INVALID_PLAN: --name: must have at least 1 character"


@pytest.mark.parametrize("line", [("import", ""), ("inspect", ""), ("migrations", "show", ""), ("migrations", "cancel", "")])
def test_an_empty_text_names_nothing(service: Service, run: Run, line: tuple[str, ...]) -> None:
    """As from an unset variable of a script. It named the present folder, or the only job that there was."""
    job = Migration(id=uuid4(), name="web", plan=PLAN, mode_effective=Mode.COLD, created_at=now())
    service.store.add(job, host="local")
    done = run(*line)
    assert (done.exit_code, "is needed, and this text is empty" in done.stderr) == (2, True)


def test_a_file_that_is_nearly_called_so_is_named(service: Service, run: Run) -> None:
    (service.settings.imports_dir / "site").mkdir()
    for name in ("web01.ova", "site/web02.ova"):
        (service.settings.imports_dir / name).write_bytes(b"not looked at")
    assert "hint: did you mean web01.ova?" in run("import", "wep01.ova", "--dry-run").stderr
    assert "hint: did you mean site/web02.ova?" in run("import", "site/web02.ovf", "--dry-run").stderr
    root = service.settings.imports_dir
    assert run("import", "another", "--dry-run").stderr.splitlines()[-1] == f"hint: the import root is {root}"


def test_an_error_is_json_where_json_is_asked_for(service: Service, run: Run) -> None:
    for arguments in (("--json", "migrations", "show", "1f3a"), ("migrations", "show", "1f3a", "--json")):
        done = run(*arguments)
        assert done.exit_code == 1
        error = json.loads(done.stdout)["error"]
        assert (error["code"], "1f3a" in error["detail"]) == ("E_MIG_NOT_FOUND", True)
        assert done.stderr.startswith("E_MIG_NOT_FOUND: ")
    assert run("migrations", "show", "1f3a").stdout == ""


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (CLASH_HINT, "remove that domain; or, for a copy next to it, give --new-identity and give the copy a name in --name"),
        ("name the concern's id in waive_concerns.", "name the concern's id in --waive."),
        ("skip_disks[3]: there is no disk", "--skip-disk: there is no disk"),
        ("target.network_map[0].source", "--network"),
        ("plan.target.memory_bytes: must be less", "--memory: must be less"),
        ("plan.shutdown: is unknown", "--shutdown: is unknown"),
        ("conversion", "--conversion"),
        ("lower, or set target.start to false", "lower, or give --no-start"),
        ("submit it as {Offline: ova_archive}", "give --kind ova_archive, or leave --kind out"),
        ("an instant start with target.start false starts nothing", "an instant start with --no-start starts nothing"),
        ("target.network_map does not name it", "--network does not name it"),
        ("the name of a mode", "the name of a mode"),
        ("nothing of the API", "nothing of the API"),
    ],
)
def test_the_words_of_the_api_as_options(words: str, options: str) -> None:
    assert as_options(words) == options


def test_a_remedy_names_fields_of_a_plan_so_that_options_can_be_made_of_them() -> None:
    remedies = [
        one.remedy
        for one in (
            concerns.hardware_incomplete("memory"),
            concerns.assumed_hardware(),
            concerns.dynamic_memory(512, 256, 1024),
        )
    ]
    for remedy in map(as_options, remedies):
        assert "--" in remedy
        assert not re.search(r"[a-z]_[a-z]|target\.", remedy), remedy
