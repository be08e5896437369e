"""Saves the service's picture of a guest's screen as a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from synvirt.cli.options import Options
from synvirt.cli.program import shown
from synvirt.errors import Conflict, DiskWriteFailed

if TYPE_CHECKING:
    from synvirt.cli.client import Client


def save(options: Options, client: "Client", path: str, file: Path) -> None:
    """Saves the picture at `path` of the service as `file`, which must not exist yet. A part of one would be in the way of the
    next try."""
    import json

    picture = client.fetch(path)
    try:
        with file.open("xb") as made:
            try:
                made.write(picture)
                made.flush()
            except BaseException:
                file.unlink(missing_ok=True)
                raise
    except FileExistsError as error:
        raise Conflict(f"{file} already exists", hint="name another file") from error
    except OSError as error:
        raise DiskWriteFailed(f"{file} cannot be written: {error.strerror}") from error
    print(json.dumps({"path": str(file), "bytes": len(picture)}) if options.json else f"{shown(str(file))}: a PNG")
