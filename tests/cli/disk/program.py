"""`synvirt disk …` in this process."""

from pathlib import Path

from typer.testing import CliRunner, Result

from synvirt.cli import app


def disk(*arguments: str | Path) -> Result:
    """What the command printed, and how it ended."""
    return CliRunner().invoke(app, ["disk", *map(str, arguments)])
