"""synvirt destinations: where volumes can go."""

from typing import Any

import typer

from synvirt.cli.listing import Cursor, Limit, print_list, print_table
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import shown
from synvirt.sizes import sized

app = typer.Typer(
    invoke_without_command=True,
    help="List where volumes can go. Choose with `synvirt import --destination NAME`.\n\nExample: synvirt destinations",
)


@app.callback()
@with_options
def destinations(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """The default is the first. The settings name them: docs/settings.md."""
    print_list(options, "/destinations", limit, cursor, none="There are no destinations", show=_table)


def _table(items: list[dict[str, Any]]) -> None:
    rows = [
        (shown(one["name"]), one["kind"], "yes" if one["default"] else "", _free(one), shown(one["problem"] or ""))
        for one in items
    ]
    print_table(("NAME", "KIND", "DEFAULT", "FREE", "PROBLEM"), rows)


def _free(one: dict[str, int | None]) -> str:
    return "" if one["free_bytes"] is None else sized(one["free_bytes"])
