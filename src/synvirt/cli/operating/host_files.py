"""synvirt files: the content of the import root."""

from typing import Annotated, Any

import typer

from synvirt.cli.listing import Cursor, Limit, at, print_table
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import shown
from synvirt.sizes import sized


@with_options
def files(
    options: Options,
    path: Annotated[str | None, typer.Argument(metavar="[PATH]", help="A folder there; none: the import root")] = None,
    *,
    limit: Limit = 1000,
    cursor: Cursor = None,
) -> None:
    """List the import root, and what of it can be imported.

    Example: synvirt files exports
    """
    import json

    asked = {"path": path, "limit": limit, "cursor": cursor}
    with options.connect() as client:
        answer = client.ask("GET", "/host-files", params=asked)
    if options.json:
        print(answer)
        return
    folder = json.loads(answer)
    if folder["entries"]:
        _table(folder["entries"])
    else:
        print("The folder is empty")
    if folder["next_cursor"]:
        print(f"There are more: --cursor {folder['next_cursor']}")


def _table(items: list[dict[str, Any]]) -> None:
    rows = [
        (
            shown(f"{one['name']}{'/' if one['type'] == 'directory' else ''}"),
            "" if one["size_bytes"] is None else sized(one["size_bytes"]),
            one["offline_kind"] or "",
            at(one["modified_at"]),
        )
        for one in items
    ]
    print_table(("NAME", "SIZE", "KIND", "CHANGED"), rows)
