"""Shows waves: lists, members, events, the forecast, deliveries to webhooks, the report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from synvirt.cli.listing import Cursor, Limit, at, id_of, print_list, print_one, print_table, segment
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import FAILED, INTERRUPTED, say, shown
from synvirt.cli.waves.asking import WAVES, MemberName, WaveName

if TYPE_CHECKING:
    from synvirt.cli.client import Client

# The most members of unknown size that a forecast names.
NAMED_MOST = 10


@with_options
def list_waves(
    options: Options,
    limit: Limit = 1000,
    cursor: Cursor = None,
    state: Annotated[list[str] | None, typer.Option(help="Only waves in this state; may be given again")] = None,
    name: Annotated[str | None, typer.Option(help="Only waves of this name")] = None,
) -> None:
    """List the waves, newest first.

    Example: synvirt waves list --state running
    """
    only = {"state": state, "name": name}
    print_list(options, WAVES.path, limit, cursor, none="There are no waves", show=_waves, only=only)


@with_options
def show(options: Options, wave: WaveName) -> None:
    """Show a wave, and what each member waits for.

    Example: synvirt waves show november
    """
    print_one(options, _path(wave), _sheet)


def _sheet(found: dict[str, Any]) -> None:
    from synvirt.model.submitter import submitter_in

    print(shown(f"{found['name']}: {found['state']}" + (f". {found['reason']}" if found["reason"] else "")))
    asking = submitter_in(found)
    if asking is not None:
        print(f"by {shown(str(asking))}")
    _members(found["members"])


@with_options
def members(
    options: Options,
    wave: WaveName,
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most this many")] = 10_000,
    cursor: Cursor = None,
    state: Annotated[list[str] | None, typer.Option(help="Only members in this state; may be given again")] = None,
) -> None:
    """List the members of a wave, and what each of them waits for.

    Example: synvirt waves members november --state failed
    """
    none, only = "There are no such members", {"state": state}
    print_list(options, _path(wave, "/members"), limit, cursor, none=none, show=_members, only=only)


@with_options
def member(options: Options, wave: WaveName, member: MemberName) -> None:
    """Show one member.

    Example: synvirt waves member november db01
    """
    print_one(options, _path(wave, f"/members/{segment(member)}"), lambda found: _members([found]))


@with_options
def watch(options: Options, wave: WaveName) -> None:
    """Follow a wave to its end; exits 1, unless it completed. Ctrl-C stops the watching, not the wave.

    Example: synvirt waves watch november
    """
    with options.connect() as client:
        id_ = id_of(client, WAVES, wave)
        try:
            state = _followed(client, id_, as_json=options.json)
        except KeyboardInterrupt:
            say(f"The wave goes on. Watch it again: synvirt waves watch {id_}", as_json=options.json)
            raise typer.Exit(INTERRUPTED) from None
    if state != "completed":
        raise typer.Exit(FAILED)


def _followed(client: "Client", id_: str, *, as_json: bool) -> str:
    """Prints what happens in the wave until it ends. The state in which it ended."""
    from synvirt.cli import client as clients
    from synvirt.errors import Internal
    from synvirt.fleet.model import WAVE_ENDS

    for event in client.follow(clients.WAVES, job_id=id_):
        if event.event != "wave":
            continue
        update = json.loads(event.data)
        print(event.data if as_json else _moved(update), flush=True)
        if update["member"] is None and update["state"] in WAVE_ENDS:
            return str(update["state"])
    raise Internal("the stream ended without the wave")


@with_options
def simulate(
    options: Options,
    wave: WaveName,
    *,
    more_destinations: Annotated[int, typer.Option(min=0, max=1000, help="With this many more hosts to copy to")] = 0,
    what_if: Annotated[
        Path | None, typer.Option(metavar="WHAT-IF.json", help="With other rates, limits or windows, as the API takes them")
    ] = None,
    format_: Annotated[Literal["json", "svg"], typer.Option("--format", help="svg: print the forecast as a picture")] = "json",
) -> None:
    """Simulate a wave: when each member cuts over, when all is done, and what delays it most.

    Example: synvirt waves simulate november --more-destinations 1
    """
    from synvirt.cli import json_files

    asked = {} if what_if is None else json_files.read(what_if)
    if more_destinations:
        asked |= {"more_destinations": more_destinations}
    with options.connect() as client:
        path = _path(wave, "/simulate")(client)
        with json_files.sent_from(what_if):
            answer = client.ask("POST", path, json=asked, params={"format": format_})
    if options.json or format_ == "svg":
        print(answer)
        return
    found = json.loads(answer)
    for line in _forecast(found):
        print(shown(line))
    print_table(
        ("MEMBER", "CUTS OVER", "HEALTHY", "WHY THEN"),
        [
            (shown(one["id"]), at(one["planned_at"] or ""), at(one["healthy_at"] or ""), shown(one["reason"]))
            for one in found["members"]
        ],
    )


@with_options
def deliveries(
    options: Options,
    wave: WaveName,
    *,
    limit: Limit = 1000,
    cursor: Cursor = None,
    state: Annotated[list[str] | None, typer.Option(help="Only those in this state; may be given again")] = None,
) -> None:
    """List what is sent to the webhooks of a wave, and the results.

    Example: synvirt waves deliveries november --state given_up
    """
    none, only = "Nothing is sent to webhooks", {"state": state}
    print_list(options, _path(wave, "/deliveries"), limit, cursor, none=none, show=_deliveries, only=only)


@with_options
def report(
    options: Options,
    wave: WaveName,
    format_: Annotated[
        Literal["csv", "json", "html"],
        typer.Option("--format", help="csv: a line for each member; html: to be sent or printed"),
    ] = "csv",
) -> None:
    """Print the report of a wave: planned and real times, outages, failures by cause.

    Example: synvirt waves report november --format html > november.html
    """
    chosen = "json" if options.json else format_
    with options.connect() as client:
        answer = client.ask("GET", _path(wave, "/report")(client), params={"format": chosen})
    print(answer, end="\n" if chosen == "json" else "")


def _path(wave: str, rest: str = "") -> "Callable[[Client], str]":
    return lambda client: f"{WAVES.path}/{id_of(client, WAVES, wave)}{rest}"


def _forecast(found: dict[str, Any]) -> list[str]:
    forecast = found["forecast"]
    lines = []
    if found["difference"]:  # it contains the end and the bottleneck
        lines.append(found["difference"])
    elif forecast is not None:
        lines.append(f"It ends on {at(forecast['ends_p50'])}, with 95 % by {at(forecast['ends_p95'])}.")
        lines.append(f"Bottleneck: {forecast['bottleneck']}")
    if forecast is None:
        lines.append("No member cuts over: see the reason of each.")
    elif found["unfinished"]:
        lines.append(f"{found['unfinished']} members do not cut over.")
    if found["assumed"]:
        names = ", ".join(map(shown, found["assumed"][:NAMED_MOST]))
        more = " …" if len(found["assumed"]) > NAMED_MOST else ""
        lines.append(f"The size of {len(found['assumed'])} members is not known. It is assumed: {names}{more}")
    return lines


def _waves(items: list[Any]) -> None:
    rows = [
        (
            one["id"],
            shown(one["name"]),
            one["state"],
            ", ".join(f"{count} {state}" for state, count in one["counts"].items()),
            at(one["created_at"]),
        )
        for one in items
    ]
    print_table(("ID", "NAME", "STATE", "MEMBERS", "CREATED"), rows)


def _members(items: list[Any]) -> None:
    rows = [
        (
            shown(one["id"]),
            one["state"],
            (one["job_id"] or "")[:8],
            shown(f"{one['host']}/{one['destination']}" if one["host"] else ""),
            shown(one["waits_for"] or one["cause"] or ""),
        )
        for one in items
    ]
    print_table(("MEMBER", "STATE", "JOB", "TO", "WHY"), rows)


def _moved(update: Any) -> str:
    if update["member"] is None:
        return shown(f"wave: {update['state']}" + (f". {update['reason']}" if update["reason"] else ""))
    return shown(f"{update['member']}: {update['member_state']}" + (f". {update['cause']}" if update["cause"] else ""))


def _deliveries(items: list[Any]) -> None:
    rows = [
        (
            str(one["number"]),
            one["event"],
            shown(one["member"] or ""),
            one["state"],
            str(one["attempts"]),
            at(one["next_at"] or ""),
            shown(one["answer"] or ""),
        )
        for one in items
    ]
    print_table(("NUMBER", "EVENT", "MEMBER", "STATE", "ATTEMPTS", "NEXT", "ANSWER"), rows)
