"""The command line. It asks the service by HTTP; but `backup mount` itself opens the data_dir's store and repository, and
`disk` and `inspect` themselves read files. main/ adds `serve` and `demo`.

synvirt disk …      disk/         its own parser, and what a copy needs: it starts in the time that a small disk takes to copy
synvirt …           commands.py   Typer, which takes longer to load
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from synvirt.cli.commands import app as app


def __getattr__(name: str) -> Any:
    """Builds `app` at its first use."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from synvirt.cli.commands import app

    return app
