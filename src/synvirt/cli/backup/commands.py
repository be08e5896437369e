"""synvirt backup: repositories, jobs, runs and restore points."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from synvirt.cli.backup.asking import (
    JOBS,
    POINTS,
    RUNS,
    Job,
    Point,
    Run,
    ask,
    list_things,
    show_thing,
    start_run,
)
from synvirt.cli.backup.jobs import add_job, change_job, jobs, remove_job, retention, show_job
from synvirt.cli.backup.mount import mount
from synvirt.cli.backup.offers import offers, release_point, show_offer
from synvirt.cli.backup.repositories import (
    add_repository,
    change_key,
    change_repository,
    collect,
    forget_repository,
    recovery_key,
    repositories,
    seal_key,
    show_repository,
    verify_repository,
)
from synvirt.cli.backup.runs import follow
from synvirt.cli.listing import Cursor, Limit, at, id_of, print_table
from synvirt.cli.options import Options, size_given, with_options
from synvirt.cli.pictures import save
from synvirt.cli.program import shown
from synvirt.sizes import sized

app = typer.Typer(no_args_is_help=True, help="Backups of this host's guests: docs/backup.md.")


OfJob = Annotated[str | None, typer.Option("--job", help="Only those of this backup job: its name or id")]


class Target(StrEnum):
    """What a restore makes."""

    EXPORT = "export"
    NEW_DOMAIN = "new-domain"
    IN_PLACE = "in-place"


class Format(StrEnum):
    """The format of exported disks."""

    RAW = "raw"
    QCOW2 = "qcow2"


# ── repositories ─────────────────────────────────────────────────────────────────────────────────────────────────────

app.command()(repositories)
app.command("add-repository")(add_repository)
app.command("show-repository")(show_repository)
app.command("change-repository")(change_repository)
app.command("recovery-key")(recovery_key)
app.command("change-key")(change_key)
app.command("seal-key")(seal_key)
app.command("verify-repository")(verify_repository)
app.command("collect")(collect)
app.command("forget-repository")(forget_repository)
app.command()(offers)
app.command("show-offer")(show_offer)
app.command("release-point")(release_point)


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

app.command()(jobs)
app.command("add-job")(add_job)
app.command("show-job")(show_job)
app.command("change-job")(change_job)
app.command("remove-job")(remove_job)
app.command()(retention)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
@with_options
def run(options: Options, job: Job) -> None:
    """Run a backup job, and watch it to its end. Ctrl-C stops the watching, not the run.

    Example: synvirt backup run nightly
    """
    start_run(options, JOBS, job, "run")


@app.command()
@with_options
def runs(
    options: Options,
    *,
    limit: Limit = 1000,
    cursor: Cursor = None,
    status: Annotated[list[str] | None, typer.Option(help="Only runs like this, such as failed; may be repeated")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Only runs of this kind, such as restore; may be repeated")] = None,
    job: OfJob = None,
) -> None:
    """List the runs, newest first: backups, restores, verifications, boot tests, collections.

    Example: synvirt backup runs --status failed --limit 20
    """
    list_things(options, RUNS, _runs, limit, cursor, only={"status": status, "kind": kind, "job_id": job})


@app.command()
@with_options
def show(options: Options, run: Run) -> None:
    """Show one run: its state, what it read and stored, and its warnings.

    Example: synvirt backup show 1f3a
    """
    from synvirt.backups.model import BackupRun
    from synvirt.cli.backup.runs import sheet

    with options.connect() as client:
        answer = client.ask("GET", f"{RUNS.path}/{id_of(client, RUNS, run)}")
    if options.json:
        print(answer)
    else:
        sheet(BackupRun.model_validate_json(answer))


@app.command()
@with_options
def watch(
    options: Options,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="None: the oldest that has not ended")] = None,
) -> None:
    """Watch a run to its end. Ctrl-C stops the watching, not the run. Exit 1: it failed.

    Example: synvirt backup watch 1f3a
    """
    import json

    from synvirt.backups.model import UNENDED

    with options.connect() as client:
        if run is None:
            under_way = {"status": [str(status) for status in UNENDED]}
            running = [item["id"] for item in json.loads(client.ask("GET", RUNS.path, params=under_way))["items"]]
            if not running:
                print("No run is under way")
                return
            run = running[-1]
        answer = client.ask("GET", f"{RUNS.path}/{id_of(client, RUNS, run)}")
        follow(options, client, answer, print_events=options.json)


@app.command()
@with_options
def cancel(
    options: Options,
    run: Run,
    lose_guest_writes: Annotated[
        bool,
        typer.Option(
            "--lose-guest-writes", help="Of a restore that started its guest at once: stop it, and lose what it wrote"
        ),
    ] = False,
) -> None:
    """Ask a run to stop. What it stored stays for the next one; no restore point is made of it.

    Example: synvirt backup cancel 1f3a
    """
    ask(options, "POST", RUNS, run, "/cancel?guest_writes=lose" if lose_guest_writes else "/cancel", outcome="is asked to stop")


# ── restore points ───────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
@with_options
def points(
    options: Options,
    *,
    limit: Limit = 1000,
    cursor: Cursor = None,
    vm_id: Annotated[str | None, typer.Option(help="Only points of this guest: its UUID")] = None,
    vm_name: Annotated[str | None, typer.Option(help="Only points of guests of this name")] = None,
    job: OfJob = None,
    repository: Annotated[str | None, typer.Option(help="Only points in this repository: its name or id")] = None,
    state: Annotated[list[str] | None, typer.Option(help="Only points in this state, such as damaged; may be repeated")] = None,
) -> None:
    """List the restore points, newest first.

    Example: synvirt backup points --vm-name web
    """
    only = {"vm_id": vm_id, "vm_name": vm_name, "job_id": job, "repository_id": repository, "state": state}
    list_things(options, POINTS, _points, limit, cursor, only=only)


@app.command()
@with_options
def verify(options: Options, point: Point) -> None:
    """Read a whole restore point, and compare it with its hashes. Exit 1: it is damaged.

    Example: synvirt backup verify 1f3a
    """
    start_run(options, POINTS, point, "verify")


@app.command()
@with_options
def restore(
    options: Options,
    point: Point,
    target: Annotated[
        Target, typer.Option(help="Files in a new folder; a guest beside the others; the guest itself, shut off")
    ] = Target.EXPORT,
    *,
    name: Annotated[
        str | None, typer.Option(help="Of the new folder or guest; else the restore's id, the guest's name")
    ] = None,
    path: Annotated[
        Path | None, typer.Option(help="Export to a new folder in this one, not in exports of the service's folder")
    ] = None,
    format: Annotated[Format, typer.Option(help="Of exported disks")] = Format.RAW,
    disk: Annotated[list[str] | None, typer.Option(help="Only this disk (vda); may be given again")] = None,
    start: Annotated[bool, typer.Option("--start", help="Start the new guest when it is restored")] = False,
    instant: Annotated[
        bool, typer.Option("--instant", help="Start the new guest at once from the restore point, and copy it while it runs")
    ] = False,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="SIZE", help="At most this much is written per second, for example 50MiB")
    ] = None,
) -> None:
    """Restore a point: to files, to a new guest, or to the guest that it is of.

    Example: synvirt backup restore 1f3a --target new-domain --name web-again --start

    Example: synvirt backup restore 1f3a --target new-domain --name web-again --instant
    """
    body: dict[str, Any] = {"target": target.replace("-", "_"), "disks": disk or []}
    fields: dict[str, Any] = {"name": name, "path": None if path is None else str(path), "start": start or instant or None}
    fields["instant"] = instant or None
    fields["bandwidth_bps"] = size_given(bandwidth, "--bandwidth")
    fields["format"] = None if format == Format.RAW else format.value
    body |= {field: value for field, value in fields.items() if value is not None}
    start_run(options, POINTS, point, "restore", json=body)


@app.command("boot-test")
@with_options
def boot_test(options: Options, point: Point) -> None:
    """Start a restore point's guest next to the others, cut off from all networks, and see whether it boots.

    Example: synvirt backup boot-test 1f3a
    """
    start_run(options, POINTS, point, "boot-test")


app.command()(mount)


@app.command("show-point")
@with_options
def show_point(options: Options, point: Point) -> None:
    """Show one restore point.

    Example: synvirt backup show-point 1f3a
    """
    show_thing(options, POINTS, point)


@app.command("remove-run")
@with_options
def remove_run(options: Options, run: Run) -> None:
    """Remove an ended run from the list. Its restore points stay.

    Example: synvirt backup remove-run 77c0
    """
    ask(options, "DELETE", RUNS, run, outcome="is removed")


@app.command("screenshot")
@with_options
def screenshot(
    options: Options, point: Point, file: Annotated[Path, typer.Argument(metavar="FILE.png", help="Where it is written")]
) -> None:
    """Save the screen of a restore point's last boot test.

    Example: synvirt backup screenshot 1f3a screen.png
    """
    with options.connect() as client:
        save(options, client, f"{POINTS.path}/{id_of(client, POINTS, point)}/screenshot", file)


@app.command()
@with_options
def protect(options: Options, point: Point) -> None:
    """Protect a restore point: it cannot be removed, and retention keeps it.

    Example: synvirt backup protect 1f3a
    """
    ask(options, "PATCH", POINTS, point, json={"protected": True}, outcome="is protected")


@app.command()
@with_options
def unprotect(options: Options, point: Point) -> None:
    """Take the protection off a restore point.

    Example: synvirt backup unprotect 1f3a
    """
    ask(options, "PATCH", POINTS, point, json={"protected": False}, outcome="is no longer protected")


@app.command("remove-point")
@with_options
def remove_point(options: Options, point: Point) -> None:
    """Remove a restore point. What only it needs is collected by a later run.

    Example: synvirt backup remove-point 1f3a
    """
    ask(options, "DELETE", POINTS, point, outcome="is removed")


# ── tables: each fits into 80 columns ────────────────────────────────────────────────────────────────────────────────


def _runs(items: list[Any]) -> None:
    rows = [
        (
            one["id"],
            one["kind"].replace("_", " "),
            one["status"],
            sized(one["progress"]["bytes_done"]),
            sized(one["stored_bytes"]),
            at(one["created_at"])[:16],
        )
        for one in items
    ]
    print_table(("ID", "KIND", "STATUS", "READ", "STORED", "CREATED"), rows)


def _points(items: list[Any]) -> None:
    rows = [
        (
            one["id"],
            shown(one["vm_name"]),
            at(one["created_at"])[:16],
            sized(one["size_bytes"]),
            sized(one["stored_bytes"]),
            one["state"],
            "yes" if one["protected"] else "",
        )
        for one in items
    ]
    print_table(("ID", "NAME", "CREATED", "SIZE", "STORED", "STATE", "PROT."), rows)
