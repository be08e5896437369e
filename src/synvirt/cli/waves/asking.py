"""Common parts of the commands of `synvirt waves`: the arguments."""

from typing import Annotated

import typer

from synvirt.cli.listing import Listed

WAVES = Listed("wave", "/waves", "synvirt waves list", "name")

WaveName = Annotated[str, typer.Argument(metavar="WAVE", help="Its name, its id, or the beginning of that")]
MemberName = Annotated[str, typer.Argument(metavar="MEMBER", help="Its id in the wave")]
