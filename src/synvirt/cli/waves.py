"""synvirt waves: many VMs in their order, within their windows."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from synvirt.cli.listing import Listed, at, id_of, print_page, print_table
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import shown
from synvirt.nearest import hint_for

WAVES = Listed("wave", "/waves", "synvirt waves list", "name")

app = typer.Typer(
    help="Waves: many VMs, in their order and within their windows.\n\nExample: synvirt waves list", no_args_is_help=True
)

WaveName = Annotated[str, typer.Argument(metavar="WAVE", help="Its name, its id, or the beginning of that")]
MemberName = Annotated[str, typer.Argument(metavar="MEMBER", help="Its id in the wave")]
Document = Annotated[Path, typer.Argument(metavar="WAVE.json", help="A wave as POST /waves takes it; - is stdin")]
Sure = Annotated[bool, typer.Option("--yes", help="Do not ask")]


@app.command("import")
@with_options
def import_(
    options: Options,
    document: Annotated[
        Path, typer.Argument(metavar="FILE", help="A wave in JSON, or a spreadsheet: XLSX or CSV; - is stdin, in JSON")
    ],
    *,
    name: Annotated[str | None, typer.Option(help="Of a spreadsheet's wave, where its rows name none")] = None,
    into: Annotated[str | None, typer.Option(metavar="WAVE", help="A draft that takes a spreadsheet's members")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List all that is wrong, and make nothing")] = False,
) -> None:
    """Make a wave from a file, as a draft. All of it is imported, or nothing: then each mistake is listed.

    Example: synvirt waves import rvtools.xlsx --name november
    """
    content = _content(document)
    is_json = content.lstrip()[:1] == b"{"
    with options.connect() as client:
        if is_json and not (dry_run or name or into):
            answer = client.ask("POST", WAVES.path, json=_parsed(document, content))
            found = json.loads(answer)
            made = [{"id": found["id"], "name": found["name"], "members": len(found["members"])}]
            answered = {"waves": made, "left_out": [], "problems": []}
        else:
            asked = {
                "name": name,
                "into": into and id_of(client, WAVES, into),
                "dry_run": "true" if dry_run else None,
            }
            params = {key: value for key, value in asked.items() if value}
            answer = client.send(f"{WAVES.path}/import", content, params=params)
            answered = json.loads(answer)
    if options.json:
        print(answer)
    else:
        _imported(answered)
    if answered["problems"]:
        raise typer.Exit(1)


@app.command()
@with_options
def select(
    options: Options,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the wave")],
    *,
    source: Annotated[str, typer.Option(help="Whose VMs: its name or id")],
    vm: Annotated[str | None, typer.Option(help="Names like this: web-*")] = None,
    folder: Annotated[str | None, typer.Option(help="In it, or below it, as `synvirt sources vms` shows folders")] = None,
    host: Annotated[str | None, typer.Option(help="On this host of the source")] = None,
    power_state: Annotated[Literal["on", "off", "suspended"] | None, typer.Option("--power", help="In this state")] = None,
    guest_os: Annotated[str | None, typer.Option(help="With this in the name of the guest's system")] = None,
    outage_budget_s: Annotated[float | None, typer.Option("--outage-budget", metavar="SECONDS", help="Of each")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how many are meant, and make nothing")] = False,
) -> None:
    """Make a wave of all VMs of a source that match, as a draft.

    Example: synvirt waves select november --source lab --folder Finance --power on
    """
    from synvirt.cli.sources import source_id

    asked: dict[str, Any] = {"vm": vm, "folder": folder, "host": host, "power_state": power_state, "guest_os": guest_os}
    asked |= {"name": name, "outage_budget_s": outage_budget_s}
    body: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    with options.connect() as client:
        body["source_id"] = source_id(client, source)
        params = {"dry_run": "true"} if dry_run else {}
        answer = client.ask("POST", f"{WAVES.path}/select", json=body, params=params)
    print(answer) if options.json else _imported(json.loads(answer))


@app.command()
@with_options
def replace(options: Options, wave: WaveName, document: Document) -> None:
    """Replace a draft.

    Example: synvirt waves replace november november.json
    """
    with options.connect() as client:
        id_ = id_of(client, WAVES, wave)
        answer = client.ask("PUT", f"{WAVES.path}/{id_}", json=_read(document))
    print(answer if options.json else f"Wave {id_} is replaced")


@app.command("list")
@with_options
def list_waves(
    options: Options,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many")] = 1000,
    cursor: Annotated[str | None, typer.Option(help="The page behind this `next_cursor`")] = None,
    state: Annotated[list[str] | None, typer.Option(help="Only waves in this state; may be given again")] = None,
    name: Annotated[str | None, typer.Option(help="Only waves of this name")] = None,
) -> None:
    """List the waves, newest first.

    Example: synvirt waves list --state running
    """
    asked = {"limit": limit, "cursor": cursor, "state": state, "name": name}
    with options.connect() as client:
        answer = client.ask("GET", WAVES.path, params={key: value for key, value in asked.items() if value})
    print_page(answer, none="There are no waves", show=_waves, as_json=options.json)


@app.command()
@with_options
def show(options: Options, wave: WaveName) -> None:
    """Show a wave, and what each member waits for.

    Example: synvirt waves show november
    """
    with options.connect() as client:
        answer = client.ask("GET", f"{WAVES.path}/{id_of(client, WAVES, wave)}")
    if options.json:
        print(answer)
        return
    found = json.loads(answer)
    print(shown(f"{found['name']}: {found['state']}" + (f". {found['reason']}" if found["reason"] else "")))
    _members(found["members"])


@app.command()
@with_options
def members(
    options: Options,
    wave: WaveName,
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most this many")] = 10_000,
    cursor: Annotated[str | None, typer.Option(help="The page behind this `next_cursor`")] = None,
    state: Annotated[list[str] | None, typer.Option(help="Only members in this state; may be given again")] = None,
) -> None:
    """List the members of a wave, and what each of them waits for.

    Example: synvirt waves members november --state failed
    """
    asked = {"limit": limit, "cursor": cursor, "state": state}
    params = {key: value for key, value in asked.items() if value}
    with options.connect() as client:
        answer = client.ask("GET", f"{WAVES.path}/{id_of(client, WAVES, wave)}/members", params=params)
    print_page(answer, none="There are no such members", show=_members, as_json=options.json)


@app.command()
@with_options
def member(options: Options, wave: WaveName, member: MemberName) -> None:
    """Show one member.

    Example: synvirt waves member november db01
    """
    with options.connect() as client:
        answer = client.ask("GET", f"{WAVES.path}/{id_of(client, WAVES, wave)}/members/{member}")
    if options.json:
        print(answer)
    else:
        _members([json.loads(answer)])


@app.command()
@with_options
def watch(options: Options, wave: WaveName) -> None:
    """Follow a wave as it moves. Ctrl-C stops the watching, not the wave.

    Example: synvirt waves watch november
    """
    from synvirt.cli import client as clients

    with options.connect() as client:
        id_ = id_of(client, WAVES, wave)
        for event in client.follow(clients.WAVES, job_id=id_):
            if event.event == "wave":
                print(event.data if options.json else _moved(json.loads(event.data)), flush=True)


@app.command()
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
    """Simulate a wave: when each member cuts over, when all is done, and what holds it back.

    Example: synvirt waves simulate november --more-destinations 1
    """
    asked = {} if what_if is None else _read(what_if)
    if more_destinations:
        asked |= {"more_destinations": more_destinations}
    with options.connect() as client:
        path = f"{WAVES.path}/{id_of(client, WAVES, wave)}/simulate"
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


@app.command()
@with_options
def go(options: Options, wave: WaveName) -> None:
    """Start a draft, or continue a held wave.

    Example: synvirt waves go november
    """
    _act(options, wave, "go")


@app.command()
@with_options
def hold(options: Options, wave: WaveName) -> None:
    """Hold a wave: nothing new begins; copies and cut-overs under way go on.

    Example: synvirt waves hold november
    """
    _act(options, wave, "hold")


@app.command()
@with_options
def cancel(options: Options, wave: WaveName, sure: Sure = False) -> None:
    """End a wave: what waits is skipped, what runs is cancelled and its source powered on again.

    Example: synvirt waves cancel november --yes
    """
    if not sure:
        typer.confirm(f"Cancel wave {wave}?", abort=True)
    _act(options, wave, "cancel")


@app.command("roll-back")
@with_options
def roll_back(
    options: Options,
    wave: WaveName,
    members: Annotated[list[str] | None, typer.Argument(metavar="[MEMBER]...", help="Their ids; none: all")] = None,
    sure: Sure = False,
) -> None:
    """Roll back a member, or all: guests here are stopped, sources powered on, copies kept.

    What they wrote here since their cut-over is in their copies only. Example: synvirt waves roll-back november db01
    """
    if not sure:
        typer.confirm(f"Roll back {', '.join(members) if members else 'all members'} of {wave}?", abort=True)
    _act(options, wave, "roll-back", {"members": members or []})


@app.command()
@with_options
def approve(
    options: Options,
    wave: WaveName,
    approver: Annotated[str | None, typer.Argument(metavar="[APPROVER]", help="As members name whose word they need")] = None,
    *,
    member: Annotated[list[str] | None, typer.Option(help="Only for this member; may be given again")] = None,
    canary: Annotated[bool, typer.Option("--canary", help="The canary is well: the others go on")] = False,
) -> None:
    """Approve members that wait for it, or let the others go on after the canary.

    Example: synvirt waves approve november "database team"
    """
    body = {"canary": True} if canary else {"approver": approver, "members": member or []}
    _act(options, wave, "approve", body)


@app.command()
@with_options
def skip(options: Options, wave: WaveName, member: MemberName) -> None:
    """Skip a member. Its job is cancelled.

    Example: synvirt waves skip november web07
    """
    _of_member(options, wave, member, "skip")


@app.command()
@with_options
def retry(options: Options, wave: WaveName, member: MemberName) -> None:
    """Retry a member that failed, was skipped or rolled back.

    Example: synvirt waves retry november web07
    """
    _of_member(options, wave, member, "retry")


@app.command()
@with_options
def deliveries(
    options: Options,
    wave: WaveName,
    *,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many")] = 1000,
    cursor: Annotated[str | None, typer.Option(help="The page behind this `next_cursor`")] = None,
    state: Annotated[list[str] | None, typer.Option(help="Only those in this state; may be given again")] = None,
) -> None:
    """List what is sent to the webhooks of a wave, and what came of it.

    Example: synvirt waves deliveries november --state given_up
    """
    asked = {"limit": limit, "cursor": cursor, "state": state}
    params = {key: value for key, value in asked.items() if value}
    with options.connect() as client:
        answer = client.ask("GET", f"{WAVES.path}/{id_of(client, WAVES, wave)}/deliveries", params=params)
    print_page(answer, none="Nothing is sent to webhooks", show=_deliveries, as_json=options.json)


@app.command("deliver-again")
@with_options
def deliver_again(
    options: Options,
    wave: WaveName,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="As `synvirt waves deliveries` lists it")],
) -> None:
    """Send a delivery again that was given up.

    Example: synvirt waves deliver-again november 17
    """
    with options.connect() as client:
        answer = client.ask("POST", f"{WAVES.path}/{id_of(client, WAVES, wave)}/deliveries/{number}/again")
    print(answer if options.json else f"Delivery {number} is sent again")


@app.command()
@with_options
def remove(options: Options, wave: WaveName) -> None:
    """Remove a draft, or a wave that has ended. Its jobs stay.

    Example: synvirt waves remove november
    """
    with options.connect() as client:
        id_ = id_of(client, WAVES, wave)
        client.ask("DELETE", f"{WAVES.path}/{id_}")
    if not options.json:
        print(f"Wave {id_} is removed")


@app.command()
@with_options
def export(
    options: Options,
    wave: WaveName,
    format_: Annotated[Literal["json", "csv"], typer.Option("--format", help="csv: its members, as a spreadsheet")] = "json",
) -> None:
    """Print a wave as it can be imported again.

    Example: synvirt waves export november > november.json
    """
    with options.connect() as client:
        path = f"{WAVES.path}/{id_of(client, WAVES, wave)}/export"
        print(client.ask("GET", path, params={"format": format_}), end="\n" if format_ == "json" else "")


@app.command()
@with_options
def report(
    options: Options,
    wave: WaveName,
    format_: Annotated[
        Literal["csv", "json", "html"], typer.Option("--format", help="csv: a line a member; html: to be sent or printed")
    ] = "csv",
) -> None:
    """Print the report of a wave: planned and real times, outages, failures by cause.

    Example: synvirt waves report november --format html > november.html
    """
    chosen = "json" if options.json else format_
    with options.connect() as client:
        answer = client.ask("GET", f"{WAVES.path}/{id_of(client, WAVES, wave)}/report", params={"format": chosen})
    print(answer, end="\n" if chosen == "json" else "")


def _read(document: Path) -> Any:
    return _parsed(document, _content(document))


def _content(document: Path) -> bytes:
    from synvirt.errors import BadRequest

    try:
        return document.read_bytes() if str(document) != "-" else typer.get_binary_stream("stdin").read()
    except OSError as error:
        raise BadRequest(f"{document} cannot be read: {error.strerror}", hint=hint_for(document, error)) from error


def _parsed(document: Path, content: bytes) -> Any:
    from synvirt.errors import BadRequest

    try:
        return json.loads(content)
    except ValueError as error:
        raise BadRequest(f"{document}: {error}", hint="it is JSON, as `synvirt waves export` prints it") from error


def _imported(answered: Any) -> None:
    for one in answered["waves"]:
        if one["id"] is None:
            print(shown(f"Wave {one['name']} would have {one['members']} member{'s' if one['members'] != 1 else ''}"))
        else:
            text = f"Wave {one['id']} is a draft with {one['members']} members. Let it go: synvirt waves go {one['id']}"
            print(text)
    if answered["left_out"]:
        print(shown(f"Left out, since they are templates: {', '.join(answered['left_out'])}"))
    if answered["problems"]:
        rows = [
            (str(one["row"] or "-"), shown(one["column"]), shown(one["detail"]), shown(one["hint"] or ""))
            for one in answered["problems"]
        ]
        print_table(("ROW", "COLUMN", "WHAT IS WRONG", "HINT"), rows)


def _act(options: Options, wave: str, action: str, body: Any = None) -> None:
    with options.connect() as client:
        answer = client.ask("POST", f"{WAVES.path}/{id_of(client, WAVES, wave)}/{action}", json=body)
    found = json.loads(answer)
    print(answer if options.json else shown(f"Wave {found['name']} is {found['state']}"))


def _of_member(options: Options, wave: str, member: str, action: str) -> None:
    with options.connect() as client:
        answer = client.ask("POST", f"{WAVES.path}/{id_of(client, WAVES, wave)}/members/{member}/{action}")
    print(answer if options.json else shown(f"{member} is {json.loads(answer)['state']}"))


def _forecast(found: dict[str, Any]) -> list[str]:
    forecast = found["forecast"]
    lines = []
    if found["difference"]:  # it has the end and the bottleneck in it
        lines.append(found["difference"])
    elif forecast is not None:
        lines.append(f"It ends on {at(forecast['ends_p50'])}, with 95 % by {at(forecast['ends_p95'])}.")
        lines.append(f"What holds it back: {forecast['bottleneck']}")
    if forecast is None:
        lines.append("No member cuts over: each says why.")
    elif found["unfinished"]:
        lines.append(f"{found['unfinished']} members do not cut over.")
    if found["assumed"]:
        lines.append(f"The size of {len(found['assumed'])} members is not known; the median of the others is taken for it.")
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
