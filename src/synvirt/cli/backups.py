"""synvirt backup repositories|jobs|run|runs|points|verify|restore|…"""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from synvirt.cli.backup_mount import mount
from synvirt.cli.listing import at, print_page, print_table
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import FAILED, INTERRUPTED, shown, sized, tell

app = typer.Typer(no_args_is_help=True, help="Backups of this host's guests: docs/backup.md.")

BACKUP = "/backup"
POLL_S = 0.5
ENDS = ("completed", "failed", "cancelled")

Id = Annotated[str, typer.Argument(metavar="ID", help="Its id")]


@app.command()
@with_options
def repositories(options: Options) -> None:
    """List the repositories."""
    with options.connect() as client:
        answer = client.ask("GET", f"{BACKUP}/repositories")
    print_page(answer, none="There are no repositories", show=_repositories, as_json=options.json)


@app.command("add-repository")
@with_options
def add_repository(
    options: Options,
    path: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of the service's host")],
    name: Annotated[str, typer.Option(help="What to call it")],
    *,
    nfs: Annotated[bool, typer.Option("--nfs", help="An NFS export must be mounted there")] = False,
    existing: Annotated[
        bool, typer.Option("--existing", help="Use one that is there; its recovery key: env SYNVIRT_RECOVERY_KEY, or asked for")
    ] = False,
) -> None:
    """Make a repository in an empty folder, or use one again with its recovery key."""
    import json
    import os

    body: dict[str, Any] = {"name": name, "kind": "nfs" if nfs else "local", "path": str(path)}
    if existing:
        body["recovery_key"] = os.environ.get("SYNVIRT_RECOVERY_KEY") or typer.prompt("Recovery key", hide_input=True)
    with options.connect() as client:
        answer = client.ask("POST", f"{BACKUP}/repositories", json=body)
        made = json.loads(answer)
        key = json.loads(client.ask("GET", f"{BACKUP}/repositories/{made['id']}/recovery-key"))["recovery_key"]
    print(answer if options.json else f"Repository {made['id']} is ready. Keep its recovery key elsewhere than here:\n{key}")


@app.command("recovery-key")
@with_options
def recovery_key(options: Options, repository: Id) -> None:
    """Print a repository's recovery key: with it and the folder, the backups outlive this host."""
    import json

    with options.connect() as client:
        answer = client.ask("GET", f"{BACKUP}/repositories/{repository}/recovery-key")
    print(answer if options.json else json.loads(answer)["recovery_key"])


@app.command()
@with_options
def jobs(options: Options) -> None:
    """List the backup jobs."""
    with options.connect() as client:
        answer = client.ask("GET", f"{BACKUP}/jobs")
    print_page(answer, none="There are no backup jobs", show=_jobs, as_json=options.json)


@app.command("add-job")
@with_options
def add_job(
    options: Options,
    vms: Annotated[list[str], typer.Argument(metavar="VM...", help="Names or UUIDs of this host's guests")],
    name: Annotated[str, typer.Option(help="What to call it")],
    repository: Annotated[str, typer.Option(help="The repository's id")],
    *,
    keep_last: Annotated[int | None, typer.Option(min=0, help="Keep so many of the newest points")] = None,
    keep_daily: Annotated[int | None, typer.Option(min=0, help="… of so many days")] = None,
    keep_weekly: Annotated[int | None, typer.Option(min=0, help="… of so many weeks")] = None,
    keep_monthly: Annotated[int | None, typer.Option(min=0, help="… of so many months")] = None,
    keep_yearly: Annotated[int | None, typer.Option(min=0, help="… of so many years")] = None,
) -> None:
    """Make a backup job; all points are kept where no --keep says else."""
    import json

    wishes = {
        "keep_last": keep_last,
        "keep_daily": keep_daily,
        "keep_weekly": keep_weekly,
        "keep_monthly": keep_monthly,
        "keep_yearly": keep_yearly,
    }
    body = {"name": name, "vm_ids": vms, "repository_id": repository}
    with options.connect() as client:
        kept = {wish: count for wish, count in wishes.items() if count is not None}
        answer = client.ask("POST", f"{BACKUP}/jobs", json=body | {"retention": kept})
    print(answer if options.json else f"Job {json.loads(answer)['id']} is made. Run it: synvirt backup run ID")


@app.command()
@with_options
def run(options: Options, job: Id) -> None:
    """Run a backup job, and wait for its end. Ctrl-C stops the waiting, not the run."""
    with options.connect() as client:
        _follow(options, client, client.ask("POST", f"{BACKUP}/jobs/{job}/run"))


@app.command()
@with_options
def runs(options: Options) -> None:
    """List the runs, newest first: backups, restores and verifications."""
    with options.connect() as client:
        answer = client.ask("GET", f"{BACKUP}/runs")
    print_page(answer, none="There are no runs", show=_runs, as_json=options.json)


@app.command()
@with_options
def cancel(options: Options, run: Id) -> None:
    """Ask a run to stop."""
    with options.connect() as client:
        answer = client.ask("POST", f"{BACKUP}/runs/{run}/cancel")
    print(answer if options.json else f"Run {run} is asked to stop")


@app.command()
@with_options
def points(options: Options) -> None:
    """List the restore points, newest first."""
    with options.connect() as client:
        answer = client.ask("GET", f"{BACKUP}/restore-points")
    print_page(answer, none="There are no restore points", show=_points, as_json=options.json)


@app.command()
@with_options
def verify(options: Options, point: Id) -> None:
    """Read all of a restore point, and hold it to what was backed up."""
    with options.connect() as client:
        _follow(options, client, client.ask("POST", f"{BACKUP}/restore-points/{point}/verify"))


class Target(StrEnum):
    EXPORT = "export"
    NEW_DOMAIN = "new-domain"
    IN_PLACE = "in-place"


class Format(StrEnum):
    RAW = "raw"
    QCOW2 = "qcow2"


@app.command()
@with_options
def restore(
    options: Options,
    point: Id,
    target: Annotated[
        Target, typer.Option(help="Files in a new folder; a guest beside the others; the guest itself, shut off")
    ] = Target.EXPORT,
    *,
    name: Annotated[
        str | None, typer.Option(help="Of the new folder or guest; else the restore's id, the guest's name")
    ] = None,
    path: Annotated[Path | None, typer.Option(help="Export to a new folder in this one, not in {data_dir}/exports")] = None,
    format: Annotated[Format, typer.Option(help="Of exported disks")] = Format.RAW,
    disk: Annotated[list[str] | None, typer.Option(help="Only this disk (vda), and others so named")] = None,
    start: Annotated[bool, typer.Option("--start", help="Start the new guest when it is restored")] = False,
) -> None:
    """Restore a point: to files, to a new guest, or to the guest that it is of.

    Example: synvirt backup restore ID --target new-domain --name web-again --start
    """
    asked: dict[str, Any] = {"target": target.replace("-", "_"), "disks": disk or []}
    wishes = {"name": name, "path": None if path is None else str(path), "start": start or None}
    wishes["format"] = None if format == Format.RAW else format.value
    body = asked | {wish: value for wish, value in wishes.items() if value is not None}
    with options.connect() as client:
        _follow(options, client, client.ask("POST", f"{BACKUP}/restore-points/{point}/restore", json=body))


@app.command("boot-test")
@with_options
def boot_test(options: Options, point: Id) -> None:
    """Start a restore point's guest beside the others, cut off from all networks, and see whether it boots."""
    with options.connect() as client:
        _follow(options, client, client.ask("POST", f"{BACKUP}/restore-points/{point}/boot-test"))


app.command()(mount)


@app.command("remove-point")
@with_options
def remove_point(options: Options, point: Id) -> None:
    """Remove a restore point. What only it needs is collected by a later run."""
    with options.connect() as client:
        client.ask("DELETE", f"{BACKUP}/restore-points/{point}")
    if not options.json:
        print(f"Restore point {point} is removed")


def _follow(options: Options, client: Any, answer: str) -> None:
    """To the run's end; exits 1 where it is not completed."""
    import json

    one, said = json.loads(answer), ""
    try:
        while one["status"] not in ENDS:
            time.sleep(POLL_S)
            answer = client.ask("GET", f"{BACKUP}/runs/{one['id']}")
            one = json.loads(answer)
            figures = one["progress"]
            now = f"{one['status']}  {sized(figures['bytes_done'])} of {sized(figures['bytes_total'])}"
            if now != said and not options.json:
                print(now, flush=True)
                said = now
    except KeyboardInterrupt:
        print(f"Run {one['id']} goes on: synvirt backup runs", flush=True)
        raise typer.Exit(INTERRUPTED) from None
    if options.json:
        print(answer)
    else:
        _told(one)
    if one["status"] != "completed":
        raise typer.Exit(FAILED)


def _told(one: dict[str, Any]) -> None:
    for warning in one["warnings"]:
        print(f"{warning['code']}: {shown(warning['message'])}")
    if one["error"] is not None:
        tell(one["error"]["code"], one["error"]["message"], one["error"]["hint"])
        return
    for point in one["restore_point_ids"]:
        print(f"restore point {point}")
    if one["path"]:
        print(f"in {shown(one['path'])}" + ("" if one["path"].startswith("/") else " of the service's data folder"))
    if one["domain"]:
        print(f"domain {shown(one['domain']['name'])} ({one['domain']['uuid']})")


def _repositories(items: list[Any]) -> None:
    rows = [
        (one["id"], shown(one["name"]), one["kind"], one["state"], str(one["points_count"]), shown(one["path"]))
        for one in items
    ]
    print_table(("ID", "NAME", "KIND", "STATE", "POINTS", "PATH"), rows)


def _jobs(items: list[Any]) -> None:
    rows = [(one["id"], shown(one["name"]), shown(", ".join(one["vm_ids"])), one["last_run_id"] or "") for one in items]
    print_table(("ID", "NAME", "GUESTS", "LAST RUN"), rows)


def _runs(items: list[Any]) -> None:
    rows = [
        (one["id"], one["kind"], one["status"], sized(one["progress"]["bytes_done"]), at(one["created_at"])) for one in items
    ]
    print_table(("ID", "KIND", "STATUS", "DONE", "CREATED"), rows)


def _points(items: list[Any]) -> None:
    rows = [
        (
            one["id"],
            shown(one["vm_name"]),
            at(one["created_at"]),
            sized(one["size_bytes"]),
            sized(one["stored_bytes"]),
            one["state"],
        )
        for one in items
    ]
    print_table(("ID", "NAME", "CREATED", "SIZE", "STORED", "STATE"), rows)
