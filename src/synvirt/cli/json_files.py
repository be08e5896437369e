"""Documents in JSON that a person names: a plan, a wave, the numbers of a simulation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

_FORM = "/openapi.json of the service describes it; `synvirt waves export` prints a wave"


def read(document: Path) -> dict[str, Any]:
    """The object in a file; in stdin, if the file is «-». BadRequest."""
    return parsed(document, content(document))


def content(document: Path) -> bytes:
    """The bytes of a file; of stdin, if the file is «-». BadRequest."""
    from synvirt.errors import content_of

    return content_of(document) if str(document) != "-" else typer.get_binary_stream("stdin").read()


def parsed(document: Path, content: bytes) -> dict[str, Any]:
    """The object in `content`, which is the file `document`. BadRequest."""
    from synvirt.errors import BadRequest
    from synvirt.texts.json_once import Doubled, loads_once

    try:
        found = loads_once(content)
    except Doubled as doubled:
        raise BadRequest(f"{document}: {doubled} is given more than once", hint="give it once") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{document} is not JSON: {error}", hint=_FORM) from error
    if not isinstance(found, dict):
        raise BadRequest(f"{document} is no object of JSON: {{…}}", hint=_FORM)
    return found


@contextmanager
def sent_from(document: Path | None) -> Iterator[None]:
    """What the service refuses in a body is in the file, of which the command's own help says nothing. None: it has no file."""
    from synvirt.cli.client import BY_HELP
    from synvirt.errors import SynvirtError

    try:
        yield
    except SynvirtError as error:
        if document is None or error.hint != BY_HELP:
            raise
        raise type(error)(f"{document}: {error.detail}", hint=_FORM) from None
