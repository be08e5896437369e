"""synvirt completion: the script for a shell to complete our commands. The shell then asks `synvirt` itself."""

import os
from enum import StrEnum
from typing import Annotated

import typer


class Shell(StrEnum):
    """The shells for which there is completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


# A shell's question is in this variable, by click's name for it.
VARIABLE = "_SYNVIRT_COMPLETE"

if VARIABLE in os.environ:  # a shell asks: load typer's answers, which typer otherwise installs with options of its own
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()


def completion(shell: Annotated[Shell, typer.Argument(help="The shell that is to complete")]) -> None:
    """Print the script by which a shell completes our commands.

    Example: synvirt completion bash > /etc/bash_completion.d/synvirt
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print(get_completion_script(prog_name="synvirt", complete_var=VARIABLE, shell=shell))
