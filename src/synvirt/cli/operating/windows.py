"""synvirt windows: when jobs may cut over whose plans name a window."""

from typing import Annotated, Any

import typer

from synvirt.cli.listing import Cursor, Limit, at, print_list, print_one, print_table, segment
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import print_sheet, shown

app = typer.Typer(
    help="When jobs cut over that name a window.\n\nExample: synvirt windows list",
    no_args_is_help=True,
)

WindowId = Annotated[str, typer.Argument(metavar="WINDOW", help="Its id, as `synvirt windows list` shows it")]
Name = Annotated[str | None, typer.Option(help="For people; by default its id")]
Zone = Annotated[str | None, typer.Option(metavar="ZONE", help="Time zone of all its times: Europe/Berlin; else UTC")]
Rule = Annotated[str | None, typer.Option(metavar="RRULE", help="When it opens again, by RFC 5545: FREQ=WEEKLY;BYDAY=SA")]
LockOuts = Annotated[
    list[str] | None,
    typer.Option("--lockout", metavar="START/END", help="It is closed then, local times; may be repeated"),
]


@app.command("list")
@with_options
def list_windows(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """List the windows, each with its next opening.

    Example: synvirt windows list
    """
    print_list(options, "/windows", limit, cursor, none="There are no windows", show=_table)


def _table(items: list[dict[str, Any]]) -> None:
    rows = [
        (shown(one["id"]), shown(one["name"]), "yes" if one["open"] else "", at(one["opens_at"]), at(one["closes_at"]))
        for one in items
    ]
    print_table(("ID", "NAME", "OPEN", "OPENS", "CLOSES"), rows)


@app.command()
@with_options
def show(options: Options, window: WindowId) -> None:
    """Show a window.

    Example: synvirt windows show saturdays
    """
    print_one(options, f"/windows/{segment(window)}", _sheet)


def _sheet(found: dict[str, Any]) -> None:
    rows = [("id", found["id"]), ("name", found["name"]), ("from", found["start"]), ("to", found["end"])]
    rows += [("zone", found["timezone"])]
    rows += [("rule", found["rrule"])] if found["rrule"] else []
    rows += [("closed", f"{one['start']} to {one['end']}") for one in found["lockouts"]]
    opens = f"{at(found['opens_at'])} to {at(found['closes_at'])}" if found["opens_at"] else "it does not open again"
    rows += [("open now" if found["open"] else "opens", opens)]
    print_sheet(rows)


@app.command()
@with_options
def add(
    options: Options,
    window: Annotated[str, typer.Argument(metavar="WINDOW", help="Its id: letters, digits and . _ -")],
    *,
    start: Annotated[str, typer.Option(metavar="TIME", help="When it opens first, local: 2026-11-28T22:00:00")],
    end: Annotated[str, typer.Option(metavar="TIME", help="When that opening ends, local")],
    name: Name = None,
    zone: Zone = None,
    rule: Rule = None,
    lockout: LockOuts = None,
) -> None:
    """Make a window.

    Example: synvirt windows add saturdays --start 2026-11-28T22:00:00 --end 2026-11-29T04:00:00 --rule FREQ=WEEKLY
    """
    body = {"id": window, "name": window} | _given(name=name, start=start, end=end, zone=zone, rule=rule, lockout=lockout)
    with options.connect() as client:
        answer = client.ask("POST", "/windows", json=body)
    made = f"Window {shown(window)} is made. Plans name it: --window {shown(window)}"
    print(answer if options.json else made + _never(answer))


@app.command()
@with_options
def change(
    options: Options,
    window: WindowId,
    *,
    start: Annotated[str | None, typer.Option(metavar="TIME", help="When it opens first, local")] = None,
    end: Annotated[str | None, typer.Option(metavar="TIME", help="When that opening ends, local")] = None,
    name: Name = None,
    zone: Zone = None,
    rule: Rule = None,
    lockout: LockOuts = None,
) -> None:
    """Change a window; what is not given stays. Jobs that name it go by the new times at once. --rule "" opens it once.

    Example: synvirt windows change saturdays --end 2026-11-29T05:00:00
    """
    given = _given(name=name, start=start, end=end, zone=zone, rule=rule, lockout=lockout)

    def changed(before: dict[str, Any]) -> dict[str, Any]:
        return {key: before[key] for key in ("id", "name", "timezone", "rrule", "start", "end", "lockouts")} | given

    with options.connect() as client:
        answer = client.edit("PUT", f"/windows/{segment(window)}", changed)
    print(answer if options.json else f"Window {shown(window)} is changed{_never(answer)}")


@app.command()
@with_options
def remove(options: Options, window: WindowId) -> None:
    """Remove a window. Refused while a job that has not ended names it.

    Example: synvirt windows remove saturdays
    """
    with options.connect() as client:
        client.ask("DELETE", f"/windows/{segment(window)}")
    if not options.json:
        print(f"Window {shown(window)} is removed")


def _never(answer: str) -> str:
    """A remark, where the window will not open: it is not refused, as a sheet or a clock may be behind."""
    import json

    found = json.loads(answer)
    return "" if found["open"] or found["opens_at"] else ". It does not open any more: its times have passed"


def _given(
    *, name: str | None, start: str | None, end: str | None, zone: str | None, rule: str | None, lockout: list[str] | None
) -> dict[str, Any]:
    """The fields of a window that options set. typer.BadParameter."""
    fields: dict[str, Any] = {"name": name, "start": start, "end": end, "timezone": zone}
    found = {key: value for key, value in fields.items() if value is not None}
    if rule is not None:
        found["rrule"] = rule or None
    if lockout is not None:
        found["lockouts"] = [_lockout(one) for one in lockout]
    return found


def _lockout(text: str) -> dict[str, str]:
    start, slash, end = text.partition("/")
    if not slash:
        raise typer.BadParameter(f"{text} is not START/END", param_hint="--lockout")
    return {"start": start, "end": end}
