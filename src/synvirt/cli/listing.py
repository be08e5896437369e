"""Lists of things with ids: their table, one of them, and the full id for the beginning of one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synvirt.cli.program import shown
from synvirt.nearest import did_you_mean

if TYPE_CHECKING:
    from datetime import datetime

    from synvirt.cli.client import Client
    from synvirt.cli.options import Options

# Options of every list that has pages.
Limit = Annotated[int, typer.Option(min=1, max=1000, help="At most this many")]
Cursor = Annotated[str | None, typer.Option(help="The page that follows this `next_cursor`")]

# With fewer columns, a UUID leaves no room for the rest of a row.
NARROW = 110
ID_CHARS = 8
# Columns of names and sentences. The others hold words and figures, which are useless when they are cut.
WRAP = frozenset({"NAME", "WHY", "WHY THEN", "WHAT IS WRONG", "HINT", "ANSWER", "PROBLEM", "RESOURCE", "MEMBERS", "FREE"})
# The least that a column wraps to, as most words are no longer.
LEAST_WRAPPED = 8
# Columns of an output that is no terminal: more than any row has.
WIDEST = 1_000_000
# Between two columns.
GAP = "  "
# These have names; an upload has none of its own.
_NAMED = ("migration", "source")


@dataclass(frozen=True, slots=True)
class Listed:
    """Things of one kind: the service's list of them, and the command that shows them."""

    noun: str
    path: str
    command: str
    # The field with a name that people may use instead of an id.
    name: str | None = None


def segment(text: str) -> str:
    """A name as a segment of a path. BadRequest: it is empty."""
    from urllib.parse import quote

    from synvirt.errors import BadRequest

    if not text:
        raise BadRequest("a name or an id is needed, and this text is empty")
    # Two dots would lead to another path.
    return text.replace(".", "%2E") if text in (".", "..") else quote(text, safe="")


def full_id(client: Any, noun: str, beginning: str) -> str:
    """The full id of a thing at /`noun`s."""
    name = "name" if noun in _NAMED else None
    return id_of(client, Listed(noun, f"/{noun}s", f"synvirt {noun}s list", name), beginning)


def id_of(client: Any, listed: Listed, beginning: str) -> str:
    """The id in the list that begins with the text, or whose thing has it as its name. A full id is not looked up. The caller
    handles none or several."""
    from synvirt.errors import BackupBadRequest, BackupNotFound, BadRequest, NotFound, UploadNotFound

    if _is_whole(beginning):
        return beginning
    of_backups = listed.path.startswith("/backup/")
    missing, unclear = (BackupNotFound, BackupBadRequest) if of_backups else (NotFound, BadRequest)
    if listed.noun == "upload":
        missing = UploadNotFound
    if not beginning:
        article = "an" if listed.noun[0] in "aeiou" else "a"
        raise unclear(
            f"the id of {article} {listed.noun} is needed, and this text is empty", hint=f"{listed.command} shows them"
        )
    items = list(_every(client, listed.path))
    ids = [item["id"] for item in items if listed.name is not None and item[listed.name] == beginning]
    ids = ids or [item["id"] for item in items if item["id"].startswith(beginning.lower())]
    if not ids:
        names = [item[listed.name] for item in items] if listed.name is not None else []
        near = did_you_mean(beginning, map(shown, names))
        raise missing(f"there is no {listed.noun} {beginning}", hint=near or f"{listed.command} shows them")
    if len(ids) > 1:
        raise unclear(f"{len(ids)} {listed.noun}s match {beginning}", hint=f"give more of the id: {listed.command}")
    return str(ids[0])


def _every(client: Any, path: str) -> Iterator[Any]:
    """All things of the list, page by page."""
    import json

    cursor: str | None = None
    while True:
        page = json.loads(client.ask("GET", path, params={"cursor": cursor}))
        yield from page["items"]
        cursor = page.get("next_cursor")  # an earlier version of the service has no pages of some lists
        if cursor is None:
            return


def _is_whole(id_: str) -> bool:
    from uuid import UUID

    try:
        UUID(id_)
    except ValueError:
        return False
    return True


def print_list(
    options: "Options",
    where: "str | Callable[[Client], str]",
    limit: int,
    cursor: str | None,
    *,
    none: str,
    show: Callable[[list[Any]], None],
    only: Mapping[str, Any] | None = None,
) -> None:
    """Prints a page of one of the service's lists, as of `print_page`. `where`: see `print_one`; `only`: the list's filters."""
    answer = _asked(options, where, {"limit": limit, "cursor": cursor, **(only or {})})
    print_page(answer, none=none, show=show, as_json=options.json)


def print_one(options: "Options", where: "str | Callable[[Client], str]", show: Callable[[Any], None]) -> None:
    """Prints one thing with `show`, or as JSON. `where`: its path; as a function, where an id in it has to be asked for."""
    import json

    answer = _asked(options, where)
    if options.json:
        print(answer)
    else:
        show(json.loads(answer))


def _asked(options: "Options", where: "str | Callable[[Client], str]", params: dict[str, Any] | None = None) -> str:
    with options.connect() as client:
        return client.ask("GET", where if isinstance(where, str) else where(client), params=params)


def print_page(answer: str, *, none: str, show: Callable[[list[Any]], None], as_json: bool) -> None:
    """Prints a page of one of the service's lists with `show`; `none` is the text for an empty one."""
    import json

    if as_json:
        print(answer)
        return
    page = json.loads(answer)
    if page["items"]:
        show(page["items"])
    else:
        print(none)
    if page.get("next_cursor"):
        print(f"There are more: --cursor {page['next_cursor']}")


def print_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table that fits into a terminal: names and sentences wrap, and nothing else is cut. A narrow terminal shows the
    beginning of an ID, which every command accepts, and one in which that is too wide breaks the lines. Elsewhere each row is
    one line."""
    from rich.cells import cell_len, set_cell_size
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    titles, rows = (
        tuple(titles),
        [tuple(shown(cell).replace("\n", "\N{REPLACEMENT CHARACTER}") for cell in row) for row in rows],
    )
    if not console.is_terminal:  # a script may read it: no line is cut, and no row is two lines
        console.width = WIDEST
    if console.width < NARROW and "ID" in titles:
        at_id = titles.index("ID")
        rows = [tuple(cell[:ID_CHARS] if at == at_id else cell for at, cell in enumerate(row)) for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(titles, *rows, strict=True)]
    if sum(widths) + len(GAP) * len(widths[1:]) <= console.width:  # nothing to wrap: some ten times as fast as a Table
        head, *lines = (GAP.join(map(set_cell_size, row, widths)).rstrip() for row in (titles, *rows))
        console.out(head, style="bold")
        if lines:
            console.out("\n".join(lines))
        return
    from rich.table import Table

    least = [min(width, LEAST_WRAPPED) if title in WRAP else width for title, width in zip(titles, widths, strict=True)]
    console.width = max(console.width, sum(least) + len(GAP) * len(least[1:]))
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=title not in WRAP, overflow="fold" if title in WRAP else "ellipsis")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def at(time: "str | datetime") -> str:
    """A time of an answer for people: by this host's clock, like the lines of a watched job. "" stays so."""
    from datetime import datetime

    moment = time if isinstance(time, datetime) else datetime.fromisoformat(time) if time else None
    return "" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
