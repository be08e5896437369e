"""The program of a command line: what it shows and does is what the whole program shows and does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import synvirt.main  # noqa: F401 - serve and demo are commands of the program from then on
from synvirt.cli import app
from synvirt.cli.named import named

_COMMANDS = {
    *(info.name for info in app.registered_groups),
    *(name for name in typer.main.get_group(app).commands),
}


def _shown(program: typer.Typer, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(program, list(arguments))
    return done.exit_code, done.output


@pytest.mark.parametrize("arguments", [[], ["--help"], ["no-such"], ["migration"], ["--no-such", "list"]])
def test_what_names_no_command_is_answered_by_the_whole_program(arguments: list[str]) -> None:
    assert _shown(named(app, arguments), *arguments) == _shown(app, *arguments)


@pytest.mark.parametrize("command", sorted(filter(None, _COMMANDS - {"disk"})))
def test_a_command_that_is_named_is_whole(command: str) -> None:
    def options(program: typer.Typer) -> Any:
        found = typer.main.get_group(program).commands[command]
        return sorted(option for parameter in found.params for option in parameter.opts), sorted(getattr(found, "commands", ()))

    arguments = ["--json", command, "--help"]
    assert options(named(app, arguments)) == options(app)
    assert _shown(named(app, arguments), *arguments) == _shown(app, *arguments)


def test_the_whole_program_stays_as_it_is() -> None:
    before = [list(app.registered_groups), list(app.registered_commands)]
    named(app, [])
    assert [app.registered_groups, app.registered_commands] == before


def test_a_shell_completes_what_no_argument_names() -> None:
    environment = {"_SYNVIRT_COMPLETE": "complete_bash", "COMP_WORDS": "synvirt migrations li", "COMP_CWORD": "2"}
    program = Path(sys.executable).with_name("synvirt")
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["list"], done.stderr
