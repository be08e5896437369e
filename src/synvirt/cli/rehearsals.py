"""synvirt rehearse, and synvirt rehearsals list|show|cancel|screenshot"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synvirt.cli.listing import Cursor, Limit, Listed, at, full_id, id_of, print_list, print_one, print_table
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import FAILED, INTERRUPTED, say, shown

if TYPE_CHECKING:
    from synvirt.cli.client import Client

app = typer.Typer(no_args_is_help=True, help="Guests started from clones, to see whether they boot.")

POLL_S = 1.0
ENDS = ("Passed", "Failed", "Cancelled")

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's name, its id, or the id's beginning")]
RehearsalId = Annotated[str, typer.Argument(metavar="ID", help="The rehearsal's id, or its beginning")]


@with_options
def rehearse(
    options: Options,
    job: JobId,
    *,
    checks: Annotated[
        list[str] | None,
        typer.Option("--check", help="A program in the guest that must end with 0, with its arguments"),
    ] = None,
    ports: Annotated[list[int] | None, typer.Option("--port", help="A TCP port that must accept a connection")] = None,
    roles: Annotated[list[str] | None, typer.Option("--role", help="What the guest is for: dns, web, sql-server …")] = None,
    urls: Annotated[list[str] | None, typer.Option("--url", help="A page that must answer with a status below 400")] = None,
    within_s: Annotated[float, typer.Option("--within", min=1, max=3600, help="Seconds that each check may take")] = 120,
    wait: Annotated[bool, typer.Option(help="Wait for its end")] = True,
) -> None:
    """Start a job's guest from clones, and look at it. It is removed afterwards. The copying goes on. Exit 1: it failed.

    Example: synvirt rehearse 1f3a --check "systemctl is-active nginx" --port 443 --url http://web01.example/health
    """
    import json

    asked: list[dict[str, Any]] = [{"kind": "command", "argv": _words(check)} for check in checks or ()]
    asked += [{"kind": "port", "port": port} for port in ports or ()]
    asked += [{"kind": "role", "role": role} for role in roles or ()]
    asked += [{"kind": "http", "url": url} for url in urls or ()]
    with options.connect() as client:
        job_id = full_id(client, "migration", job)
        answer = client.ask(
            "POST", f"/migrations/{job_id}/rehearsals", json={"checks": [{**one, "within_s": within_s} for one in asked]}
        )
        found = json.loads(answer)
        if wait:
            (found,) = _until_their_end(options, client, [found])
    if options.json:
        print(json.dumps(found))
    elif wait:
        _sheet(found)
    else:
        print(f"Rehearsal {found['id']} waits for its clones. See it: synvirt rehearsals show {job_id} {found['id']}")
    if found["state"] in ("Failed", "Cancelled"):
        raise typer.Exit(FAILED)


def _words(check: str) -> list[str]:
    import shlex

    try:
        return shlex.split(check)
    except ValueError as error:
        raise typer.BadParameter(f"{check!r}: {error}", param_hint="--check") from error


@app.command()
@with_options
def together(
    options: Options,
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="JOB...", help="The jobs' ids, or their beginnings, in order")
    ] = None,
    *,
    wave: Annotated[str | None, typer.Option(help="The members of this wave, with their own checks, in place of jobs")] = None,
    checks: Annotated[
        list[str] | None,
        typer.Option("--check", help="JOB:PROGRAM: a program in that guest that must end with 0, with its arguments"),
    ] = None,
    ports: Annotated[list[str] | None, typer.Option("--port", help="JOB:PORT: a TCP port of that guest")] = None,
    roles: Annotated[list[str] | None, typer.Option("--role", help="JOB:ROLE: what that guest is for")] = None,
    urls: Annotated[list[str] | None, typer.Option("--url", help="JOB:URL: a page of that guest")] = None,
    within_s: Annotated[float, typer.Option("--within", min=1, max=3600, help="Seconds that each check may take")] = 120,
    wait: Annotated[bool, typer.Option(help="Wait for the end of all")] = True,
) -> None:
    """Rehearse several guests in one network, so that what they need of each other is there. They are started in this order,
    each once the one before it has booted. Exit 1: one of them failed.

    Example: synvirt rehearsals together 1f3a 2b4c --role 1f3a:postgresql --url 2b4c:http://shop.example/health
    """
    import json

    with options.connect() as client:
        ids = {job: full_id(client, "migration", job) for job in jobs or ()}
        given = {"command": checks, "port": ports, "role": roles, "http": urls}
        checks_of = _checks_of_jobs(ids, given, within_s)
        members = [{"migration_id": ids[job], "checks": checks_of[job]} for job in ids]
        body: dict[str, Any] = {"members": members}
        if wave is not None:
            from synvirt.cli.waves.asking import WAVES

            body = {"wave_id": id_of(client, WAVES, wave)}
        answer = client.ask("POST", "/rehearsals", json=body)
        found = json.loads(answer)["items"]
        if wait:
            found = _until_their_end(options, client, found)
    if options.json:
        print(json.dumps({"items": found, "next_cursor": None}))
    for one in found if not options.json else ():
        print(f"Job {one['migration_id']}, rehearsal {one['id']}")
        _sheet(one)
    if any(one["state"] in ("Failed", "Cancelled") for one in found):
        raise typer.Exit(FAILED)


def _checks_of_jobs(
    jobs: Iterable[str], given: Mapping[str, list[str] | None], within_s: float
) -> dict[str, list[dict[str, Any]]]:
    """The checks of each job. `given`: by the kind of the checks, JOB:VALUE each. BadParameter names the wrong one."""
    import shlex

    # Of each kind: the check's field, and how its value is read.
    fields: dict[str, tuple[str, Callable[[str], Any]]] = {
        "command": ("argv", shlex.split),
        "port": ("port", int),
        "role": ("role", str),
        "http": ("url", str),
    }
    found: dict[str, list[dict[str, Any]]] = {job: [] for job in jobs}
    for kind, (field, read) in fields.items():
        for text in given[kind] or ():
            job, _, value = text.partition(":")
            if job not in found:
                raise typer.BadParameter(f"{text!r} does not begin with one of the jobs: JOB:VALUE")
            try:
                found[job].append({"kind": kind, field: read(value), "within_s": within_s})
            except ValueError as error:
                raise typer.BadParameter(f"{text!r}: {error}") from error
    return found


def _until_their_end(options: Options, client: "Client", begun: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Waits for these rehearsals, and gives them as they ended. Ctrl-C stops the waiting, not the rehearsals."""
    try:
        return [_until_its_end(client, one, say=not options.json) for one in begun]
    except KeyboardInterrupt:
        for one in begun:
            job_id, id_ = one["migration_id"], one["id"]
            say(
                f"Rehearsal {id_} goes on, unless it has ended. See it: synvirt rehearsals show {job_id} {id_}. "
                f"End it: synvirt rehearsals cancel {job_id} {id_}",
                as_json=options.json,
            )
        raise typer.Exit(INTERRUPTED) from None


def _until_its_end(client: "Client", found: dict[str, Any], *, say: bool) -> dict[str, Any]:
    import json
    import time

    def lost() -> None:
        if say:
            print("the service does not answer; waiting for it", flush=True)

    state = ""
    while found["state"] not in ENDS:
        if say and found["state"] != state:
            print(found["state"], flush=True)
        state = found["state"]
        time.sleep(POLL_S)
        path = f"/migrations/{found['migration_id']}/rehearsals/{found['id']}"
        found = json.loads(client.ask_again(path, on_lost=lost))
    return found


@app.command("list")
@with_options
def list_(options: Options, job: JobId, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """List the rehearsals of a job, newest first.

    Example: synvirt rehearsals list 1f3a
    """
    none = "This job was never rehearsed."
    print_list(options, lambda client: _path_of_all(client, job), limit, cursor, none=none, show=_table)


def _table(items: list[dict[str, Any]]) -> None:
    print_table(
        ("ID", "STATE", "BEGAN", "BOOT", "OUTAGE", "CHECKS"),
        (
            (
                shown(one["id"]),
                shown(one["state"]),
                at(one["started_at"] or one["created_at"]),
                _seconds(one["boot_s"]),
                _seconds(one["outage_s"]),
                f"{sum(check['ok'] for check in one['checks'])} of {len(one['checks'])}",
            )
            for one in items
        ),
    )


@app.command()
@with_options
def show(options: Options, job: JobId, rehearsal: RehearsalId) -> None:
    """Show one rehearsal, and the results of its checks.

    Example: synvirt rehearsals show 1f3a 9c02
    """
    print_one(options, lambda client: _path(client, job, rehearsal), _sheet)


@app.command()
@with_options
def cancel(options: Options, job: JobId, rehearsal: RehearsalId) -> None:
    """Stop a rehearsal, and remove what it made.

    Example: synvirt rehearsals cancel 1f3a 9c02
    """
    with options.connect() as client:
        answer = client.ask("POST", f"{_path(client, job, rehearsal)}/cancel")
    print(answer if options.json else "It ends when everything that it made is removed.")


@app.command()
@with_options
def screenshot(
    options: Options,
    job: JobId,
    rehearsal: RehearsalId,
    file: Annotated[Path, typer.Argument(metavar="FILE.png", help="Where it is written")],
) -> None:
    """Save what the rehearsed guest's screen showed last.

    Example: synvirt rehearsals screenshot 1f3a 9c02 screen.png
    """
    from synvirt.cli.pictures import save

    with options.connect() as client:
        save(options, client, f"{_path(client, job, rehearsal)}/screenshot", file)


def _path_of_all(client: "Client", job: str) -> str:
    return f"/migrations/{full_id(client, 'migration', job)}/rehearsals"


def _path(client: "Client", job: str, rehearsal: str) -> str:
    path = _path_of_all(client, job)
    return f"{path}/{id_of(client, Listed('rehearsal', path, f'synvirt rehearsals list {job}'), rehearsal)}"


def _sheet(found: dict[str, Any]) -> None:
    from synvirt.model.submitter import submitter_in

    print(
        f"{shown(found['state'])}: the source as it was on {at(found['moment'])}" if found["moment"] else shown(found["state"])
    )
    asking = submitter_in(found)
    if asking is not None:
        print(f"asked by {shown(str(asking))}")
    for check in found["checks"]:
        print(f"  {'ok  ' if check['ok'] else 'BAD '} {shown(check['name'])}: {shown(check['detail'])}")
    for one in found["sameness"]:
        if one["grade"] in ("wrong", "look"):
            was, here = (shown(str(one[side])) if one[side] is not None else "nothing" for side in ("source", "clone"))
            print(f"  {one['grade']:<5}{shown(one['item'])}: {was} at the source, {here} here; {shown(one['reason'])}")
    for name, title in (("conversion_s", "Conversion"), ("boot_s", "Boot"), ("outage_s", "Outage of a cut-over at that time")):
        if found[name] is not None:
            print(f"  {title}: {_seconds(found[name])}")
    if found["error"] is not None:
        print(f"  {shown(found['error']['code'])}: {shown(found['error']['message'])}")
        if found["error"]["hint"]:
            print(f"  {shown(found['error']['hint'])}")


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} s"
