"""A command that works on this host alone takes no service elsewhere: what it would do is not what was asked for."""

import pytest
import typer

from synvirt.main import app
from tests.cli.conftest import Run
from tests.cli.test_equals_api import COMMANDS, _commands

ELSEWHERE = "https://192.0.2.1"

# The command ─▶ what it needs besides; each has no operation of the API. Of the second kind SYNVIRT_SERVER counts too: they are
# about a service, and the first about files.
OF_FILES = {
    "serve": "",
    "demo": "",
    "disk": "",
    "receipt verify": ".",
}
OF_THIS_SERVICE = {
    "config show": "",
    "config check": "",
    "password": "",
    "accounts list": "",
    "accounts add": "eve",
    "accounts remove": "eve",
    "support-bundle": "",
    "backup mount": "POINT",
}
# Those that ask for an operation that has another command too; that go by --server; that have no such option.
OTHERS = {"uploads rm", "backup unprotect", "migrations submit", "migrations dry-run", "doctor", "completion"}


def test_each_command_asks_the_service_or_refuses_one_elsewhere() -> None:
    asking = {" ".join(word for word in command.split() if "=" not in word) for command in COMMANDS.values()}
    every = {name for name, _ in _commands(typer.main.get_command(app))}
    assert every - asking == OF_FILES.keys() | OF_THIS_SERVICE.keys() | OTHERS


@pytest.mark.parametrize(("command", "more"), [*OF_FILES.items(), *OF_THIS_SERVICE.items()])
def test_a_service_elsewhere_is_refused(run: Run, command: str, more: str) -> None:
    for line in (f"--server {ELSEWHERE} {command} {more}", f"{command} {more} --server {ELSEWHERE}"):
        if not line.startswith("disk"):  # its own parser has no such option
            done = run(*line.split(), typed="x\n")
            assert (done.exit_code, done.stderr.partition(":")[0]) in ((2, "E_MIG_BAD_REQUEST"), (2, "E_BAK_BAD_REQUEST"))
            assert "elsewhere" in done.stderr or "own host" in done.stderr, done.stderr


@pytest.mark.parametrize(("command", "more"), OF_THIS_SERVICE.items())
def test_a_service_elsewhere_of_the_environment_is_refused_too(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, more: str
) -> None:
    monkeypatch.setenv("SYNVIRT_SERVER", ELSEWHERE)
    done = run(*command.split(), *more.split(), typed="x\n")
    assert done.exit_code == 2
    assert "SYNVIRT_SERVER" in done.stderr


def test_files_are_read_here_whatever_service_is_meant(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNVIRT_SERVER", ELSEWHERE)
    assert "has no receipt" in run("receipt", "verify", ".").stderr


@pytest.mark.parametrize("option", ["--user eve", "--cacert /etc/hostname", "--insecure"])
@pytest.mark.parametrize("command", ["migrations list", "doctor", "receipt verify ."])
def test_options_of_a_service_elsewhere_want_one(run: Run, command: str, option: str) -> None:
    done = run(*command.split(), *option.split())
    assert (done.exit_code, "name it: --server" in done.stderr) == (2, True), done.stderr
