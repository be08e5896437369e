"""The command line can do what the API can: a command for each operation, an option for each of its query parameters."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import typer

from synvirt.cli import app
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.values import now
from tests.cli.conftest import Run
from tests.fakes.service import PLAN, Service

# METHOD /path below /api/v1 ─▶ the command. Where its options are called otherwise: after it, `parameter=--option`; a parameter
# that is an argument of the command, or that it always gives, is `parameter=`.
COMMANDS = {
    "GET /audit": "audit list",
    "GET /audit/export": "audit export",
    "GET /audit/verify": "audit verify",
    "POST /backup/jobs": "backup add-job",
    "GET /backup/jobs": "backup jobs",
    "GET /backup/jobs/{}": "backup show-job",
    "PATCH /backup/jobs/{}": "backup change-job",
    "DELETE /backup/jobs/{}": "backup remove-job",
    "GET /backup/jobs/{}/retention": "backup retention",
    "POST /backup/jobs/{}/retention": "backup retention",
    "POST /backup/jobs/{}/run": "backup run",
    "GET /backup/offers": "backup offers",
    "GET /backup/offers/{}": "backup show-offer",
    "DELETE /backup/offers/{}/protections/{}": "backup release-point",
    "POST /backup/repositories": "backup add-repository",
    "GET /backup/repositories": "backup repositories",
    "GET /backup/repositories/{}": "backup show-repository",
    "PATCH /backup/repositories/{}": "backup change-repository",
    "DELETE /backup/repositories/{}": "backup forget-repository",
    "POST /backup/repositories/{}/collect": "backup collect bandwidth_bps=--bandwidth",
    "POST /backup/repositories/{}/change-key": "backup change-key",
    "POST /backup/repositories/{}/sealed-key": "backup seal-key",
    "GET /backup/repositories/{}/recovery-key": "backup recovery-key",
    "POST /backup/repositories/{}/verify": "backup verify-repository",
    "GET /backup/restore-points": "backup points job_id=--job repository_id=--repository",
    "GET /backup/restore-points/{}": "backup show-point",
    "PATCH /backup/restore-points/{}": "backup protect",
    "DELETE /backup/restore-points/{}": "backup remove-point",
    "POST /backup/restore-points/{}/boot-test": "backup boot-test",
    "POST /backup/restore-points/{}/restore": "backup restore",
    "GET /backup/restore-points/{}/screenshot": "backup screenshot",
    "POST /backup/restore-points/{}/verify": "backup verify",
    "GET /backup/runs": "backup runs job_id=--job",
    "GET /backup/runs/stream": "backup watch run_id=",
    "GET /backup/runs/{}": "backup show",
    "DELETE /backup/runs/{}": "backup remove-run volumes=",
    "POST /backup/runs/{}/cancel": "backup cancel guest_writes=--lose-guest-writes",
    "GET /migrator/destinations": "destinations",
    "GET /migrator/windows": "windows list",
    "POST /migrator/windows": "windows add",
    "GET /migrator/windows/{}": "windows show",
    "PUT /migrator/windows/{}": "windows change",
    "DELETE /migrator/windows/{}": "windows remove",
    "GET /migrator/host-files": "files path=",
    "POST /migrator/host-files/inspect": "inspect",
    "GET /migrator/hosts": "hosts list",
    "POST /migrator/hosts/{}/fence": "hosts fence",
    "POST /migrator/keyring/rotate": "keyring rotate",
    "POST /migrator/migrations": "import",
    "GET /migrator/migrations": "migrations list",
    "GET /migrator/migrations/stream": "migrations watch migration_id=",
    "GET /migrator/migrations/{}": "migrations show",
    "DELETE /migrator/migrations/{}": "migrations remove",
    "POST /migrator/migrations/{}/cancel": "migrations cancel guest_writes=--lose-guest-writes",
    "POST /migrator/migrations/{}/cutover": "migrations cutover",
    "POST /migrator/migrations/{}/repair": "migrations repair",
    "POST /migrator/migrations/{}/retry": "migrations retry",
    "POST /migrator/migrations/{}/take-over": "migrations take-over",
    "GET /migrator/migrations/{}/screenshot": "migrations screenshot",
    "GET /migrator/migrations/{}/receipt": "receipt get",
    "GET /migrator/receipts/key": "receipt key",
    "POST /migrator/rehearsals": "rehearsals together",
    "POST /migrator/migrations/{}/rehearsals": "rehearse",
    "GET /migrator/migrations/{}/rehearsals": "rehearsals list",
    "GET /migrator/migrations/{}/rehearsals/{}": "rehearsals show",
    "POST /migrator/migrations/{}/rehearsals/{}/cancel": "rehearsals cancel",
    "GET /migrator/migrations/{}/rehearsals/{}/screenshot": "rehearsals screenshot",
    "POST /migrator/remote-files/inspect": "inspect",
    "POST /migrator/sources": "sources add",
    "GET /migrator/sources": "sources list",
    "GET /migrator/sources/{}": "sources show",
    "PATCH /migrator/sources/{}": "sources change",
    "DELETE /migrator/sources/{}": "sources remove",
    "POST /migrator/sources/{}/record": "sources record vm_id=--vm",
    "POST /migrator/sources/{}/test": "sources test vm_id=--vm",
    "GET /migrator/sources/{}/vms": "sources vms",
    "GET /migrator/sources/{}/vms/{}": "sources inspect",
    "POST /migrator/uploads": "uploads add",
    "GET /migrator/uploads": "uploads list",
    "GET /migrator/upload-limits": "uploads add size_bytes=",
    "GET /migrator/uploads/{}": "uploads show",
    "DELETE /migrator/uploads/{}": "uploads remove",
    "POST /migrator/uploads/{}/inspect": "uploads inspect",
    "GET /tokens": "tokens list",
    "POST /tokens": "tokens create",
    "DELETE /tokens/{}": "tokens revoke",
    "GET /waves": "waves list",
    "POST /waves": "waves import",
    "POST /waves/import": "waves import",
    "POST /waves/select": "waves select",
    "GET /waves/stream": "waves watch wave_id=",
    "GET /waves/{}": "waves show",
    "PUT /waves/{}": "waves replace",
    "DELETE /waves/{}": "waves remove",
    "POST /waves/{}/approve": "waves approve",
    "POST /waves/{}/cancel": "waves cancel",
    "GET /waves/{}/deliveries": "waves deliveries",
    "POST /waves/{}/deliveries/{}/again": "waves deliver-again",
    "GET /waves/{}/export": "waves export",
    "POST /waves/{}/go": "waves go",
    "POST /waves/{}/hold": "waves hold",
    "GET /waves/{}/members": "waves members",
    "GET /waves/{}/members/{}": "waves member",
    "POST /waves/{}/members/{}/retry": "waves retry",
    "POST /waves/{}/retry": "waves retry",
    "POST /waves/{}/members/{}/skip": "waves skip",
    "GET /waves/{}/report": "waves report",
    "POST /waves/{}/roll-back": "waves roll-back",
    "POST /waves/{}/simulate": "waves simulate",
}
# What a body's field is called there, where it is no option of its own name: its argument (in capitals), options of other
# names, or a file that holds the whole body.
FIELDS = {
    "POST /backup/jobs": {
        "vm_ids": "VM...",
        "repository_id": "--repository",
        "retention": "--keep-last --keep-hourly --keep-daily --keep-weekly --keep-monthly --keep-yearly",
        "bandwidth_bps": "--bandwidth",
    },
    "PATCH /backup/jobs/{}": {
        "vm_ids": "--vm",
        "retention": "--keep-last --keep-hourly --keep-daily --keep-weekly --keep-monthly --keep-yearly",
        "bandwidth_bps": "--bandwidth",
    },
    # A key is a secret: of the environment, or asked for.
    "POST /backup/repositories": {
        "kind": "--nfs --peer",
        "path": "[FOLDER]",
        "recovery_key": "--existing",
        "passphrase": "--existing",
    },
    "PATCH /backup/repositories/{}": {"path": "--folder", "peer": "--peer --peer-user --fingerprint"},
    "POST /backup/repositories/{}/sealed-key": {"passphrase": ""},
    "PATCH /backup/restore-points/{}": {"protected": ""},
    "POST /backup/restore-points/{}/restore": {"bandwidth_bps": "--bandwidth", "disks": "--disk"},
    "POST /migrator/host-files/inspect": {"path": "PATH"},
    "POST /migrator/migrations": {"plan": "migrations submit PLAN.json"},
    "POST /migrator/rehearsals": {"members": "JOB... --check --port --role --url --within", "wave_id": "--wave"},
    "POST /migrator/migrations/{}/rehearsals": {"checks": "--check --port --role --url --within"},
    "POST /migrator/migrations/{}/retry": {"plan": "--set"},
    "POST /migrator/remote-files/inspect": {"url": "PATH", "options": "--endpoint --region --remote-fingerprint"},
    "POST /migrator/sources": {
        "name": "NAME",
        "endpoint": "URL",
        "credentials": "--source-user --secret --credential",
        "options": "--option --fingerprint --any-certificate",
    },
    "PATCH /migrator/sources/{}": {
        "credentials": "--source-user --secret --credential",
        "options": "--option --fingerprint --any-certificate",
    },
    "POST /migrator/uploads": {"file": "FILE"},
    "POST /migrator/windows": {"id": "WINDOW", "timezone": "--zone", "rrule": "--rule", "lockouts": "--lockout"},
    "PUT /migrator/windows/{}": {"id": "WINDOW", "timezone": "--zone", "rrule": "--rule", "lockouts": "--lockout"},
    "POST /tokens": {"name": "NAME", "expires_days": "--days"},
    "POST /waves": {"": "FILE"},
    "POST /waves/select": {
        "name": "NAME",
        "source_id": "--source",
        "power_state": "--power",
        "outage_budget_s": "--outage-budget",
    },
    "POST /waves/{}/approve": {"approver": "[APPROVER]", "members": "--member"},
    "POST /waves/{}/retry": {"members": "[MEMBER]..."},
    "POST /waves/{}/roll-back": {"members": "[MEMBER]..."},
    "POST /waves/{}/simulate": {"": "--what-if"},
    "PUT /waves/{}": {"": "WAVE.json"},
}
# One SynVirt speaks it to another; no person does.
SPOKEN_BY_SERVICES = "/backup/peer/"


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    inner = getattr(command, "commands", {})
    if not inner or getattr(command, "invoke_without_command", False):
        yield " ".join(path), {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    for name, each in inner.items():
        yield from _commands(each, (*path, name))


def _arguments(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from _arguments(each, (*path, name))
    yield " ".join(path), {each.metavar or each.name.upper() for each in command.params if each.param_type_name == "argument"}


def _fields(document: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """What the body of each operation has, of all its forms."""

    def names(schema: dict[str, Any]) -> set[str]:
        if "$ref" in schema:
            return names(document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]])
        inner = [names(one) for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, [])]
        return set(schema.get("properties", {})).union(*inner)

    for operation, body in _bodies(document):
        yield operation, set().union(*(names(form.get("schema", {})) for form in body["content"].values()))


def _bodies(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        if path.startswith("/api/v1") and SPOKEN_BY_SERVICES not in path:
            for method, operation in methods.items():
                if "requestBody" in operation:
                    yield _operation(method, path), operation["requestBody"]


def _operation(method: str, path: str) -> str:
    parts = ["{}" if part.startswith("{") else part for part in path.removeprefix("/api/v1").split("/")]
    return f"{method.upper()} {'/'.join(parts)}"


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for path, methods in document["paths"].items():
        if not path.startswith("/api/v1") or SPOKEN_BY_SERVICES in path:
            continue
        for method, operation in methods.items():
            parameters = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
            yield _operation(method, path), parameters


def test_every_operation_has_a_command_and_every_parameter_an_option(tmp_path: Path) -> None:
    service = Service(tmp_path)
    try:
        operations = dict(_operations(service.app.openapi()))
    finally:
        service.close()
    commands = dict(_commands(typer.main.get_command(app)))
    assert set(operations) == set(COMMANDS), "a new operation needs a command, or a row that is no more is left"
    missing = []
    for operation, parameters in operations.items():
        called = [word for word in COMMANDS[operation].split() if "=" not in word]
        otherwise = dict(word.split("=") for word in COMMANDS[operation].split() if "=" in word)
        options = commands.get(" ".join(called))
        if options is None:
            missing.append(f"{operation}: {' '.join(called)}")
            continue
        for name in parameters:
            option = otherwise.get(name, f"--{name.replace('_', '-')}")
            if option and option not in options:
                missing.append(f"{operation}: {' '.join(called)} {option}")
    assert missing == []


def test_every_field_of_a_body_has_an_option_an_argument_or_a_file(tmp_path: Path) -> None:
    service = Service(tmp_path)
    try:
        fields = dict(_fields(service.app.openapi()))
    finally:
        service.close()
    root = typer.main.get_command(app)
    options, arguments = dict(_commands(root)), dict(_arguments(root))
    assert FIELDS.keys() <= fields.keys(), "a row of an operation that is no more is left"
    missing = []
    for operation, names in fields.items():
        command = " ".join(word for word in COMMANDS[operation].split() if "=" not in word)
        otherwise = FIELDS.get(operation, {})
        assert otherwise.keys() <= names | {""}, f"{operation}: a row of a field that is no more is left"
        for name in names:
            called = otherwise.get(name, otherwise.get("", f"--{name.replace('_', '-')}"))
            if (other := called.rpartition(" ")[0]) in options:
                has, called = arguments[other], called.rpartition(" ")[2]
            else:
                has = options.get(command, set()) | arguments.get(command, set())
            missing += [f"{operation}: {command} {word} ({name})" for word in called.split() if word not in has]
    assert missing == []


def test_a_plan_in_a_file_becomes_a_job(service: Service, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(PLAN.model_dump_json())
    assert "Watch it: synvirt migrations watch" in run("migrations", "submit", file).stdout
    assert json.loads(run("--json", "migrations", "submit", file).stdout)["plan"]["mode"] == PLAN.mode
    file.write_text('{"plan": {"mode": "Lukewarm"}}')
    refused = run("migrations", "submit", file)
    assert refused.exit_code == 1
    assert "E_MIG_INVALID_PLAN" in refused.stderr


def test_every_command_takes_the_shared_options() -> None:
    """`disk` and `completion` speak to no service."""
    for name, options in _commands(typer.main.get_command(app)):
        if name not in ("disk", "completion", ""):
            assert {"--config", "--data-dir", "--json", "--server"} <= options, name


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    with made.served():
        yield made
    made.close()


ANSWERED = ("/audit", "/audit/verify", "/tokens", "/migrator/migrations", "/migrator/sources", "/migrator/uploads")


@pytest.mark.parametrize("path", ANSWERED)
def test_json_is_the_answer_of_the_api(service: Service, run: Run, path: str) -> None:
    service.submit()
    with service.local() as client:
        made = client.post(client.base_url.copy_with(path="/api/v1/tokens"), json={"name": "ci", "role": "viewer"})
        assert made.status_code == 201
        answer = client.get(client.base_url.copy_with(path=f"/api/v1{path}")).text
    assert run(*COMMANDS[f"GET {path}"].split(), "--json").stdout == answer + "\n"


@pytest.mark.parametrize(("path", "command"), [("migrator/migrations", "migrations"), ("migrator/uploads", "uploads")])
def test_an_error_in_json_is_the_problem_of_the_api(service: Service, run: Run, path: str, command: str) -> None:
    """The hint may name a command."""
    missing = uuid4()
    with service.local() as client:
        problem = client.get(client.base_url.copy_with(path=f"/api/v1/{path}/{missing}")).json()
    done = run(command, "show", missing, "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found | {"hint": problem["hint"]}) == (1, problem | {"error": found["error"]})
    assert found["error"] == {name: found[name] for name in ("code", "detail", "hint")}


def test_what_lies_in_the_import_root(service: Service, run: Run) -> None:
    assert run("files").stdout.strip() == "The folder is empty"
    (service.settings.imports_dir / "web.qcow2").write_bytes(b"QFI\xfb" + bytes(508))
    (service.settings.imports_dir / "exports").mkdir()
    reported = run("files").stdout
    assert "exports/" in reported
    assert "qcow2" in reported
    assert "There are more: --cursor" in run("files", "--limit", 1).stdout
    assert {entry["name"] for entry in json.loads(run("--json", "files").stdout)["entries"]} == {"web.qcow2", "exports"}
    assert run("files", "nosuch").exit_code == 1


def test_a_screenshot_into_a_file(service: Service, run: Run, tmp_path: Path) -> None:
    job = Migration(id=uuid4(), name="web", plan=PLAN, state=State.FAILED, mode_effective=Mode.COLD, created_at=now())
    service.store.add(job, host="local")
    file = tmp_path / "screen.png"
    assert run("migrations", "screenshot", job.id, file).exit_code == 1
    assert not file.exists()
    service.screenshots[job.id] = b"\x89PNG and more"
    assert run("migrations", "screenshot", str(job.id)[:8], file).exit_code == 0
    assert file.read_bytes() == b"\x89PNG and more"
    assert run("migrations", "screenshot", job.id, file).exit_code == 1, "it is never written over"


def test_a_screenshot_that_the_disk_takes_only_half_of_leaves_nothing(service: Service, run: Run, tmp_path: Path) -> None:
    """Else the next try is refused, as there is a file, and that is no picture."""
    job = Migration(id=uuid4(), name="web", plan=PLAN, state=State.FAILED, mode_effective=Mode.COLD, created_at=now())
    service.store.add(job, host="local")
    service.screenshots[job.id], file = bytes(9 << 20), tmp_path / "screen.png"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
    try:
        done = run("migrations", "screenshot", job.id, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (done.exit_code, "screen.png cannot be written" in done.stderr) == (1, True), done.stderr
    assert not file.exists()
    assert run("migrations", "screenshot", job.id, file).exit_code == 0
