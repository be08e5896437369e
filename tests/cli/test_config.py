"""The settings of the service, and where each value came from; and every command reads the service's own settings."""

import errno
import json
import os
import re
import socket
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from synvirt import settings
from synvirt.api import Listening, authenticator, tls
from synvirt.api.callers.oidc import oidc
from synvirt.cli import app
from synvirt.cli.program import FAILED, failed
from synvirt.errors import BadRequest
from synvirt.main.destinations import make_destinations
from synvirt.main.running import check_files
from synvirt.settings import load, origins, service_config, starting
from synvirt.settings.data_dir import prepare_data_dir
from tests.cli.conftest import Run

FILE = """
data_dir = "{folder}"
base_url = "/virt"
database_url = "postgresql://synvirt:hunter2@db/synvirt"
[destinations.archive]
kind = "directory"
path = "/srv/archive"
"""

OIDC = """
oidc_issuer = "https://id.example"
oidc_client_id = "synvirt"
oidc_redirect_uri = "https://kvm1.example:8441/login/oidc/callback"
oidc_client_secret_file = "{folder}/none.secret"
oidc_roles = {{ ops = "operator" }}
listen = "127.0.0.1:0"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("SYNVIRT_DATA_DIR", "SYNVIRT_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    path = tmp_path / "synvirt.toml"
    path.write_text(FILE.format(folder=tmp_path))
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def test_each_value_says_where_it_came_from(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNVIRT_LOG_LEVEL", "warning")
    code, stdout, _ = run("config", "show", "--config", file, "--json")
    assert code == 0
    reported = json.loads(stdout)
    assert reported["file"] == str(file)
    assert reported["settings"]["base_url"] == {"value": "/virt", "origin": str(file)}
    assert reported["settings"]["log_level"] == {"value": "warning", "origin": "environment SYNVIRT_LOG_LEVEL"}
    assert reported["settings"]["jobs_at_once"]["origin"] == "default"
    assert "hunter2" not in stdout
    _, stdout, _ = run("config", "show", "--config", file, "--data-dir", tmp_path / "other")
    assert any(line.split() == ["data_dir", str(tmp_path / "other"), "--data-dir"] for line in stdout.splitlines())
    assert "hunter2" not in stdout


def test_every_setting_is_reported(file: Path) -> None:
    assert set(json.loads(run("config", "show", "--config", file, "--json")[1])["settings"]) == set(
        settings.Settings.model_fields
    )


def test_the_nearer_layer_is_the_origin() -> None:
    assert origins(environ={"SYNVIRT_LISTEN": "127.0.0.1:1"}, flags={"listen": "127.0.0.1:2"}) == {"listen": "--listen"}


def test_settings_that_would_not_start_a_service(file: Path) -> None:
    code, _, stderr = run("config", "check", "--config", file)
    assert (code, "host_id" in stderr) == (2, True)
    file.write_text(file.read_text().replace("\nbase_url", '\nhost_id = "kvm1"\nbase_url'))
    code, stdout, _ = run("config", "check", "--config", file)
    assert (code, "The settings are right" in stdout) == (0, True)
    file.write_text(file.read_text().replace('"/virt"', '"/virt"\ndestination = "nosuch"'))
    code, _, stderr = run("config", "check", "--config", file)
    assert (code, "nosuch" in stderr, "archive" in stderr) == (2, True, True)


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ('auth = "pam"', "no group of users is set"),
        ('listen = "192.0.2.1:8441"', "192.0.2.1 is not an address of this host"),
        ('listen = "a..b:8441"', "a..b is not an address of this host"),
        ('tls = false\nlisten = "0.0.0.0:8441"', "passwords would cross the network in clear"),
        (OIDC, "none.secret cannot be read"),
        ('database_url = "sqlite:///{folder}/none/store.db"', "setting database_url: there is no folder {folder}/none"),
        ('zfs_pool = "a/b"', "setting zfs_pool: the zfs pool 'a/b'"),
        ('[destinations.x]\nkind = "zfs"\npool = "1"', "setting destinations_x: the zfs pool '1'"),
        ('[destinations.x]\nkind = "rbd"\npool = "a b"', "setting destinations_x: the Ceph pool 'a b'"),
        ('remote_ca_file = "{folder}/none.pem"', "none.pem cannot be used: No such file"),
        ('remote_ca_file = "{folder}/tls.crt"', "no PEM certificate is in it"),
        ('tls_certificate = "{folder}/tls.crt"', "tls_certificate and tls_key belong together"),
        ('tls_certificate = "{folder}/tls.crt"\ntls_key = "{folder}/none.key"', "none.key cannot be read"),
        ('tls_certificate = "{folder}/tls.crt"\ntls_key = "{folder}/tls.crt"', "are not a PEM certificate and its key"),
        ('tls_certificate = "{folder}/tls.crt"\ntls_key = "{folder}"', "is not a file"),
    ],
)
def test_a_check_refuses_what_a_start_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, named: str) -> None:
    monkeypatch.delenv("SYNVIRT_DATA_DIR", raising=False)
    (tmp_path / "tls.crt").write_text("nonsense")
    named = named.format(folder=tmp_path)
    file = tmp_path / "synvirt.toml"
    file.write_text(f'data_dir = "{tmp_path}/data"\n{lines.format(folder=tmp_path)}\n')
    code, stdout, stderr = run("config", "check", "--config", file)
    assert (code, named in stderr, stdout) == (2, True, ""), stderr
    started = load(config=file, environ={})
    prepare_data_dir(started)
    reason = re.escape(named) if "192" not in named else "192.0.2.1"

    def begins() -> None:
        check_files(started)
        make_destinations(started)
        _ = authenticator(started, announce=lambda line: None), oidc(started)

    with pytest.raises(BadRequest, match=reason), closing(Listening(started)):
        begins()


def test_a_check_passes_what_this_user_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a certificate is the service's user's alone."""

    def unreadable(settings: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/etc/synvirt/tls.key")

    monkeypatch.setattr(starting, "given_certificate", unreadable)
    monkeypatch.setattr(tls, "given_certificate", unreadable)
    made = settings.Settings(data_dir=tmp_path)
    starting.check(made)
    with pytest.raises(BadRequest, match=r"tls\.key cannot be read: Permission denied"):
        tls.certificate(made)


def test_the_port_of_the_running_service_is_no_mistake(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        starting.check(settings.Settings(data_dir=tmp_path, listen=f"127.0.0.1:{taken.getsockname()[1]}"))


def test_a_wrong_value_names_the_file_or_the_variable(file: Path) -> None:
    file.write_text('log_level = "loud"')
    with pytest.raises(BadRequest, match=f"log_level \\({file}\\)"):
        load(config=file, environ={})
    with pytest.raises(BadRequest, match=r"jobs_at_once \(environment SYNVIRT_JOBS_AT_ONCE\)"):
        load(environ={"SYNVIRT_JOBS_AT_ONCE": "none"})


def test_no_given_setting_means_the_services_own_settings(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SERVICE_CONFIGS", (file.with_name("none.toml"), file))
    assert service_config({}) == file
    assert service_config({"SYNVIRT_DATA_DIR": "/elsewhere"}) is None
    assert service_config({"SYNVIRT_CONFIG": "/chosen.toml"}) == Path("/chosen.toml")
    assert service_config({"SYNVIRT_CONFIG": ""}) == file
    assert json.loads(run("config", "show", "--json")[1])["settings"]["base_url"]["value"] == "/virt"
    assert json.loads(run("--data-dir", "/x", "config", "show", "--json")[1])["settings"]["base_url"]["value"] != "/virt"


def test_the_doctor_looks_at_what_the_service_is_set_to(file: Path, tmp_path: Path) -> None:
    code, stdout, _ = run("doctor", "--config", file, "--json")
    (data_dir,) = (check for check in json.loads(stdout)["checks"] if check["name"] == "data_dir")
    assert (code in (0, 1), data_dir["detail"].startswith(f"{tmp_path}: ")) == (True, True)


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_setting_or_a_settings_file_that_is_nearly_called_so_is_named(run: Run, tmp_path: Path, command: str) -> None:
    file = tmp_path / "synvirt.toml"
    file.write_text('lisen = "127.0.0.1:1"\n')
    assert "hint: did you mean listen?" in run("config", command, "--config", file).stderr
    assert f"hint: did you mean {file}?" in run("config", command, "--config", tmp_path / "synvrit.toml").stderr


def test_where_settings_came_from_stands_in_one_column(run: Run) -> None:
    lines = run("config", "show").stdout.splitlines()
    # A long value pushes its own line out, as a short column for names did with long names.
    short = [line for line in lines if line.endswith(" default") and len(line.split()) == 2]
    assert "oidc_client_secret_file" in {line.split()[0] for line in short}
    assert len({line.rindex("default") for line in short}) == 1


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize("command", ["show", "check"])
@pytest.mark.parametrize(
    ("name", "why"), [("file", "Not a dir"), ("file/inside", "Not a dir"), ("to-nothing/x", "link to nothing")]
)
def test_a_folder_that_can_be_none_is_said_by_both(
    run: Run, tmp_path: Path, command: str, name: str, why: str, as_json: list[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "to-nothing").symlink_to("nothing")
    before = sorted(tmp_path.iterdir())
    done = run("config", command, "--data-dir", tmp_path / name, *as_json)
    assert (done.exit_code, why in done.stderr, "--data-dir" in done.stderr) == (2, True, True)
    if as_json:
        assert set(json.loads(done.stdout)) == {"type", "title", "status", "code", "detail", "hint", "error"}
    assert run("config", command, "--data-dir", tmp_path / "new/folder").exit_code == 0
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_folder_on_a_read_only_file_system_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    there = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*there[:8], there.f_flag | os.ST_RDONLY, there.f_namemax)))
    done = run("config", command, "--data-dir", tmp_path / "new")
    assert (done.exit_code, "Read-only file system" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\xfe", "is not a text in UTF-8"),
        (b'data_dir = ""', "setting data_dir"),
        (b'data_dir = "a\\u0000b"', "setting data_dir"),
        (b'remote_ca_file = ""', "setting remote_ca_file"),
        (b'[destinations.fast]\nkind = "directory"\npath = ""', "this text is empty"),
    ],
)
@pytest.mark.parametrize("command", ["show", "check"])
def test_a_settings_file_that_says_nothing_sensible_is_wrong_usage(file: Path, command: str, content: bytes, why: str) -> None:
    file.write_bytes(content)
    code, _, stderr = run("config", command, "--config", file)
    assert (code, why in stderr, "E_MIG_BAD_REQUEST" in stderr) == (2, True, True)


def test_an_empty_variable_is_not_the_folder_in_which_a_command_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNVIRT_DATA_DIR", "")
    code, _, stderr = run("config", "show")
    assert (code, "environment SYNVIRT_DATA_DIR" in stderr, "empty" in stderr) == (2, True, True)


@pytest.mark.parametrize(
    "line",
    [
        "config check --config /dev/zero",
        "migrations submit /dev/zero",
        "sources add x https://h --kind pve_api --source-user root --credential f=@/dev/zero",
    ],
)
def test_a_document_without_an_end_is_refused(run: Run, line: str) -> None:
    done = run(*line.split())
    assert done.exit_code == 2


@pytest.mark.parametrize("option", ["--data-dir", "--config", "--cacert"])
def test_an_empty_option_is_no_path_either(run: Run, option: str) -> None:
    done = run("config", "show", option, "")
    assert (done.exit_code, "this text is empty" in done.stderr) == (2, True)


@pytest.mark.parametrize(("address", "why"), [("foo", "not an address"), ("http://host", "in clear"), ("https://", "address")])
def test_a_wrong_address_is_said_before_a_password_is_asked_for(run: Run, address: str, why: str) -> None:
    done = run("migrations", "list", "--server", address)
    assert (done.exit_code, why in done.stderr, "assword of" in done.stderr) == (2, True, False)


@pytest.mark.parametrize(
    "address", ["https://eve:s3cret@127.0.0.1:1", "http://eve:s3cret@host", "eve:s3cret@host:8441", "https://eve:s3cret@"]
)
def test_a_password_in_an_address_is_refused_and_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """It was in the errors and in the question for a password, and was not used."""
    monkeypatch.setenv("SYNVIRT_PASSWORD", "another")
    done = run("migrations", "list", "--json", "--server", address)
    assert (done.exit_code, "SYNVIRT_PASSWORD" in done.stderr) == (2, True)
    assert "s3cret" not in done.stdout + done.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_takes_nothing_is_no_mistake_of_the_program(capsys: pytest.CaptureFixture[str], number: int) -> None:
    assert failed(OSError(number, os.strerror(number), "/data/keyring/tls.key")) == FAILED
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"E_MIG_DISK_WRITE_FAILED: /data/keyring/tls.key cannot be written: {os.strerror(number)}\nhint: ")


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/x"), RuntimeError("can't start new thread")],
    ids=["EMFILE", "thread"],
)
def test_a_host_that_has_no_more_of_something_is_no_mistake_of_the_program(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    assert failed(error) == FAILED
    stderr = capsys.readouterr().err
    assert stderr.startswith("E_MIG_INTERNAL: this command cannot go on: ")
    assert "ulimit" in stderr
    assert "report it" not in stderr
