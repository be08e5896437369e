"""Common parts of the commands of `synvirt waves`: the arguments, and files in JSON."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from synvirt.cli.listing import Listed

WAVES = Listed("wave", "/waves", "synvirt waves list", "name")

WaveName = Annotated[str, typer.Argument(metavar="WAVE", help="Its name, its id, or the beginning of that")]
MemberName = Annotated[str, typer.Argument(metavar="MEMBER", help="Its id in the wave")]


def read(document: Path) -> Any:
    """The JSON of a file; of stdin, if the file is «-». BadRequest."""
    return parsed(document, content(document))


def content(document: Path) -> bytes:
    """The bytes of a file; of stdin, if the file is «-». BadRequest."""
    from synvirt.errors import content_of

    return content_of(document) if str(document) != "-" else typer.get_binary_stream("stdin").read()


def parsed(document: Path, content: bytes) -> Any:
    """The JSON in `content`, which is the file `document`. BadRequest."""
    from synvirt.errors import BadRequest

    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{document}: {error}", hint="it is JSON, as `synvirt waves export` prints it") from error
