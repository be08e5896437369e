"""Whole waves: imported from a file, made of a source's VMs, replaced, exported."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from synvirt.cli.listing import id_of, print_table
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import shown
from synvirt.cli.waves.asking import WAVES, WaveName
from synvirt.sizes import counted

Document = Annotated[Path, typer.Argument(metavar="WAVE.json", help="A wave as POST /waves takes it; - is stdin")]


@with_options
def import_(
    options: Options,
    document: Annotated[
        Path, typer.Argument(metavar="FILE", help="A wave in JSON, or a spreadsheet: XLSX or CSV; - is stdin, in JSON")
    ],
    *,
    name: Annotated[str | None, typer.Option(help="Of a spreadsheet's wave, where its rows name none")] = None,
    into: Annotated[str | None, typer.Option(metavar="WAVE", help="A draft that takes a spreadsheet's members")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List all errors, and create nothing")] = False,
) -> None:
    """Make a wave from a file, as a draft. All of it is imported, or nothing: then each mistake is listed.

    Example: synvirt waves import rvtools.xlsx --name november
    """
    from synvirt.cli import json_files

    content = json_files.content(document)
    is_json = content.lstrip()[:1] == b"{"
    with options.connect() as client:
        if is_json and not (dry_run or name or into):
            with json_files.sent_from(document):
                answer = client.ask("POST", WAVES.path, json=json_files.parsed(document, content))
            found = json.loads(answer)
            made = [{"id": found["id"], "name": found["name"], "members": len(found["members"])}]
            answered = {"waves": made, "left_out": [], "problems": []}
        else:
            asked = {"name": name, "into": into and id_of(client, WAVES, into), "dry_run": dry_run}
            answer = client.send(f"{WAVES.path}/import", content, params=asked)
            answered = json.loads(answer)
    if options.json:
        print(answer)
    else:
        _imported(answered)
    if answered["problems"]:
        raise typer.Exit(1)


@with_options
def select(
    options: Options,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the wave")],
    *,
    source: Annotated[str, typer.Option(help="The source of the VMs: its name or id")],
    vm: Annotated[str | None, typer.Option(help="Names like this: web-*")] = None,
    folder: Annotated[str | None, typer.Option(help="In it, or below it, as `synvirt sources vms` shows folders")] = None,
    host: Annotated[str | None, typer.Option(help="On this host of the source")] = None,
    power_state: Annotated[Literal["on", "off", "suspended"] | None, typer.Option("--power", help="In this state")] = None,
    guest_os: Annotated[str | None, typer.Option(help="With this in the name of the guest's system")] = None,
    outage_budget_s: Annotated[float | None, typer.Option("--outage-budget", metavar="SECONDS", help="Of each")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how many match, and create nothing")] = False,
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
        answer = client.ask("POST", f"{WAVES.path}/select", json=body, params={"dry_run": dry_run})
    print(answer) if options.json else _imported(json.loads(answer))


@with_options
def replace(options: Options, wave: WaveName, document: Document) -> None:
    """Replace a draft. With the `etag` of an export it is refused, if the draft was changed since.

    Example: synvirt waves replace november november.json
    """
    from synvirt.cli import json_files

    with options.connect() as client:
        id_ = id_of(client, WAVES, wave)
        with json_files.sent_from(document):
            answer = client.ask("PUT", f"{WAVES.path}/{id_}", json=json_files.read(document))
    print(answer if options.json else f"Wave {id_} is replaced")


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


def _imported(answered: Any) -> None:
    for one in answered["waves"]:
        members = counted(one["members"], "member")
        if one["id"] is None:
            print(shown(f"Wave {one['name']} would have {members}"))
        else:
            print(f"Wave {one['id']} is a draft with {members}. Start it: synvirt waves go {one['id']}")
    if answered["left_out"]:
        print(shown(f"Left out, since they are templates: {', '.join(answered['left_out'])}"))
    if answered["problems"]:
        rows = [
            (str(one["row"] or "-"), shown(one["column"]), shown(one["detail"]), shown(one["hint"] or ""))
            for one in answered["problems"]
        ]
        print_table(("ROW", "COLUMN", "WHAT IS WRONG", "HINT"), rows)
