"""synvirt hosts: lists the hosts that share one store, and fences a lost one."""

from typing import Annotated, Any

import typer

from synvirt.cli.listing import Cursor, Limit, at, print_list, print_table, segment
from synvirt.cli.options import Options, confirm, with_options
from synvirt.cli.program import shown
from synvirt.sizes import sized

app = typer.Typer(help="The hosts that share one PostgreSQL.\n\nExample: synvirt hosts list", no_args_is_help=True)


@app.command("list")
@with_options
def list_hosts(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """Each host with the state of its lease, its jobs and what is free.

    Example: synvirt hosts list
    """
    print_list(options, "/hosts", limit, cursor, none="There are no hosts", show=_table)


def _table(items: list[dict[str, Any]]) -> None:
    rows = [
        (
            shown(one["id"]),
            shown(one["name"]),
            one["state"],
            at(one["seen_at"]),
            shown(one["version"]),
            str(one["jobs"]),
            shown(", ".join(_free(destination) for destination in one["destinations"])),
            _room(one["room"]),
        )
        for one in items
    ]
    print_table(("ID", "NAME", "STATE", "SEEN", "VERSION", "JOBS", "FREE", "FOR GUESTS"), rows)


@app.command()
@with_options
def fence(
    options: Options,
    host: Annotated[str, typer.Argument(help="Its id, as `synvirt hosts list` shows it")],
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask: the host is off")] = False,
) -> None:
    """Fence a host that is off: its jobs may go on elsewhere, where their storage is shared.

    Make sure that it is off first, by its power or its management board. Example: synvirt hosts fence kvm2 --yes
    """
    confirm(options, f"Is {host} off, and are its guests?", sure=sure)
    with options.connect() as client:
        answer = client.ask("POST", f"/hosts/{segment(host)}/fence")
    print(answer if options.json else f"{shown(host)} is fenced")


def _room(room: dict[str, Any] | None) -> str:
    if room is None:
        return "?"
    memory, cpus = max(0, room["free_memory_bytes"]), max(0.0, room["free_cpus"])
    return f"{sized(memory)}, {cpus:.0f} CPUs"


def _free(destination: dict[str, object]) -> str:
    free_bytes = destination["free_bytes"]
    return f"{destination['name']} {sized(free_bytes) if isinstance(free_bytes, int) else '?'}"
