"""Lists of things that have ids: their table, and the id that a beginning of one means."""

from collections.abc import Iterable
from typing import Any


def full_id(client: Any, noun: str, beginning: str) -> str:
    """The id, of those at /`noun`s, that begins so. An id in full is not looked up; none or several that fit are the caller's
    to see to."""
    import json

    from synvirt.errors import BadRequest, NotFound

    if len(beginning) >= 32:
        return beginning
    items = json.loads(client.ask("GET", f"/{noun}s"))["items"]
    ids = [item["id"] for item in items if item["id"].startswith(beginning.lower())]
    if not ids:
        raise NotFound(f"there is no {noun} {beginning}", hint=f"synvirt {noun}s list shows them")
    if len(ids) > 1:
        raise BadRequest(f"{len(ids)} {noun}s begin with {beginning}", hint="give more of the id")
    return str(ids[0])


def print_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Only the column NAME may wrap. What is printed is `shown` already."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=title != "NAME")
    for row in rows:
        table.add_row(*row)
    # Not a terminal: no line is cut at 80 columns, a script may read it.
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def at(time: str) -> str:
    """A time of an answer, as people read it."""
    return time[:19].replace("T", " ")
