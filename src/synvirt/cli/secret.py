"""Secrets for a command: from the environment, else asked for on a terminal, else a line of the standard input.

Never an option's value: any user who lists the processes of this host could read it.
"""

import os
import sys

import typer

from synvirt.errors import shortened


def secret(what: str, *, variable: str | None = None, confirm: bool = False) -> str:
    """The secret. `variable`: of the environment, which comes first. `confirm`: it is new, and is typed twice.

    BadRequest, if there is none.
    """
    from synvirt.errors import BadRequest

    found = os.environ.get(variable, "") if variable else ""
    if not found:
        if not sys.stdin.isatty():
            found = sys.stdin.readline().rstrip("\n")
        if not found and _on_a_terminal():
            found = str(typer.prompt(shortened(what), hide_input=True, confirmation_prompt=confirm, err=True))
    if not found:
        set_it = f"set {variable}, or " if variable else ""
        raise BadRequest(
            f"{what} is missing: there is no terminal to ask on, and no line in the standard input",
            hint=f"{set_it}run the command in a terminal, or send it as the first line of the standard input",
        )
    return found


def _on_a_terminal() -> bool:
    """Also if the standard input is a document that the command has read: the prompt goes to the terminal itself."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
