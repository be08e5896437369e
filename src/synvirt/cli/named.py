"""A program with only those commands that its arguments name.

Typer reads each option of each command before it runs one. For the others, a name and a help text are enough, which is all that
`synvirt --help` shows: this saves two thirds of the time in which a command starts.
"""

import copy
import inspect
from collections.abc import Collection
from typing import Any

import typer
from typer.main import get_command_name, solve_typer_info_help


def named(app: typer.Typer, arguments: Collection[str]) -> typer.Typer:
    """The program. `app` itself stays unchanged."""
    lean = copy.copy(app)
    lean.registered_groups = [info if info.name in arguments else _without_commands(info) for info in app.registered_groups]
    lean.registered_commands = [
        info if _name(info) in arguments else _without_options(info) for info in app.registered_commands
    ]
    return lean


def _without_commands(info: Any) -> Any:
    shown = copy.copy(info)
    shown.typer_instance, shown.help = typer.Typer(), solve_typer_info_help(info)
    return shown


def _without_options(info: Any) -> Any:
    shown = copy.copy(info)
    shown.name, shown.help, shown.callback = _name(info), info.help or inspect.getdoc(info.callback), _nothing
    return shown


def _name(info: Any) -> str:
    return str(info.name or get_command_name(info.callback.__name__))


def _nothing() -> None:
    raise AssertionError("a command that no argument names is not run")
