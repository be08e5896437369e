"""synvirt backup: repositories, jobs, runs and restore points."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from synvirt.cli.backup_mount import mount
from synvirt.cli.backup_runs import follow
from synvirt.cli.listing import Listed, at, id_of, print_page, print_table
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import shown, sized

app = typer.Typer(no_args_is_help=True, help="Backups of this host's guests: docs/backup.md.")

REPOSITORIES = Listed("repository", "/backup/repositories", "synvirt backup repositories", "name")
JOBS = Listed("backup job", "/backup/jobs", "synvirt backup jobs", "name")
RUNS = Listed("run", "/backup/runs", "synvirt backup runs")
POINTS = Listed("restore point", "/backup/restore-points", "synvirt backup points")

ShortId = "Its id, or the beginning of it"
Run = Annotated[str, typer.Argument(metavar="RUN", help=ShortId)]
Point = Annotated[str, typer.Argument(metavar="POINT", help=ShortId)]
Job = Annotated[str, typer.Argument(metavar="JOB", help="Its name or id")]
Repository = Annotated[str, typer.Argument(metavar="REPOSITORY", help="Its name or id")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="At most this many")]
Cursor = Annotated[str | None, typer.Option(help="The page behind this `next_cursor`")]


class Quiesce(StrEnum):
    OFF = "off"
    TRY = "try"
    REQUIRE = "require"


class Target(StrEnum):
    EXPORT = "export"
    NEW_DOMAIN = "new-domain"
    IN_PLACE = "in-place"


class Format(StrEnum):
    RAW = "raw"
    QCOW2 = "qcow2"


# ── what they have in common ─────────────────────────────────────────────────────────────────────────────────────────


def _list(options: Options, listed: Listed, table: Any, limit: int, cursor: str | None) -> None:
    params = {"limit": limit} | ({"cursor": cursor} if cursor else {})
    with options.connect() as client:
        answer = client.ask("GET", listed.path, params=params)
    things = listed.path.rpartition("/")[2].replace("-", " ")
    print_page(answer, none=f"There are no {things}", show=table, as_json=options.json)


def _ask(options: Options, method: str, listed: Listed, one: str, rest: str = "", *, said: str, json: Any = None) -> None:
    """Something that is done when it is answered."""
    with options.connect() as client:
        id_ = id_of(client, listed, one)
        answer = client.ask(method, f"{listed.path}/{id_}{rest}", json=json)
    if not options.json:
        print(f"{listed.noun.capitalize()} {id_} {said}")
    elif answer:
        print(answer)


def _start(options: Options, listed: Listed, one: str, rest: str, *, json: Any = None, params: Any = None) -> None:
    """Something that becomes a run."""
    with options.connect() as client:
        path = f"{listed.path}/{id_of(client, listed, one)}/{rest}"
        follow(options, client, client.ask("POST", path, json=json, params=params))


# ── repositories ─────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
@with_options
def repositories(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """List the repositories.

    Example: synvirt backup repositories
    """
    _list(options, REPOSITORIES, _repositories, limit, cursor)


@app.command("add-repository")
@with_options
def add_repository(
    options: Options,
    folder: Annotated[Path | None, typer.Argument(metavar="[FOLDER]", help="A folder of the service's host")] = None,
    *,
    name: Annotated[str, typer.Option(help="What to call it")],
    nfs: Annotated[bool, typer.Option("--nfs", help="An NFS export must be mounted there")] = False,
    peer: Annotated[str | None, typer.Option(metavar="URL", help="What another SynVirt offers, in place of a folder")] = None,
    fingerprint: Annotated[str | None, typer.Option(help="SHA-256 of the peer's certificate")] = None,
    peer_user: Annotated[
        str, typer.Option(help="The offer's account; the password: env SYNVIRT_PEER_PASSWORD, or asked for")
    ] = "",
    existing: Annotated[
        bool, typer.Option("--existing", help="Use one that is there; its recovery key: env SYNVIRT_RECOVERY_KEY, or asked for")
    ] = False,
) -> None:
    """Make a repository in an empty folder, or use one again with its recovery key.

    Example: synvirt backup add-repository /srv/backups --name here

    Example: synvirt backup add-repository /mnt/nas/backups --nfs --name nas --existing
    """
    import json

    kind = "peer" if peer is not None else "nfs" if nfs else "local"
    body: dict[str, Any] = {"name": name, "kind": kind}
    if folder is not None:
        body["path"] = str(folder)
    if peer is not None:
        password = os.environ.get("SYNVIRT_PEER_PASSWORD") or typer.prompt("The peer's password", hide_input=True, err=True)
        account = {"username": peer_user, "password": password}
        body["peer"] = {"url": peer, "fingerprint_sha256": fingerprint or "", "credentials": account}
    if existing:
        key = os.environ.get("SYNVIRT_RECOVERY_KEY") or typer.prompt("Recovery key", hide_input=True, err=True)
        body["recovery_key"] = key
    with options.connect() as client:
        answer = client.ask("POST", REPOSITORIES.path, json=body)
        made = json.loads(answer)
        key = json.loads(client.ask("GET", f"{REPOSITORIES.path}/{made['id']}/recovery-key"))["recovery_key"]
    print(answer if options.json else f"Repository {made['id']} is ready. Keep its recovery key elsewhere than here:\n{key}")


@app.command("recovery-key")
@with_options
def recovery_key(options: Options, repository: Repository) -> None:
    """Print a repository's recovery key: with it and the folder, the backups outlive this host.

    Example: synvirt backup recovery-key here
    """
    import json

    with options.connect() as client:
        answer = client.ask("GET", f"{REPOSITORIES.path}/{id_of(client, REPOSITORIES, repository)}/recovery-key")
    print(answer if options.json else json.loads(answer)["recovery_key"])


@app.command("verify-repository")
@with_options
def verify_repository(options: Options, repository: Repository) -> None:
    """Read all of a repository, and hold it to what was written. Exit 1: something in it is damaged.

    Example: synvirt backup verify-repository here
    """
    _start(options, REPOSITORIES, repository, "verify")


@app.command("collect")
@with_options
def collect(
    options: Options,
    repository: Repository,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only count")] = False,
) -> None:
    """Remove what no restore point needs, in two steps a day apart; each backup run does so at its end.

    Example: synvirt backup collect here --dry-run
    """
    _start(options, REPOSITORIES, repository, "collect", params={"dry_run": dry_run})


@app.command("forget-repository")
@with_options
def forget_repository(options: Options, repository: Repository) -> None:
    """Forget a repository that no job writes to. What lies in it stays: add it again with its recovery key.

    Example: synvirt backup forget-repository here
    """
    _ask(options, "DELETE", REPOSITORIES, repository, said="is forgotten; what lies in it stays")


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
@with_options
def jobs(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """List the backup jobs.

    Example: synvirt backup jobs
    """
    _list(options, JOBS, _jobs, limit, cursor)


Keep = Annotated[int | None, typer.Option(min=0, help="Keep so many of the newest points")]
KeepHourly = Annotated[int | None, typer.Option(min=0, help="… the last one of so many hours")]
KeepDaily = Annotated[int | None, typer.Option(min=0, help="… of so many days")]
KeepWeekly = Annotated[int | None, typer.Option(min=0, help="… of so many weeks")]
KeepMonthly = Annotated[int | None, typer.Option(min=0, help="… of so many months")]
KeepYearly = Annotated[int | None, typer.Option(min=0, help="… of so many years")]
Schedule = Annotated[str | None, typer.Option(help="Run by itself: five fields of cron, in UTC; «never»: no more")]


def _retention(*counts: int | None) -> dict[str, int]:
    lines = ("keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly", "keep_yearly")
    return {line: count for line, count in zip(lines, counts, strict=True) if count is not None}


@app.command("add-job")
@with_options
def add_job(
    options: Options,
    vms: Annotated[list[str], typer.Argument(metavar="VM...", help="Names or UUIDs of this host's guests")],
    *,
    name: Annotated[str, typer.Option(help="What to call it")],
    repository: Annotated[str, typer.Option(help="The repository's name or id")],
    quiesce: Annotated[Quiesce, typer.Option(help="Freeze the file systems of a running guest for the moment")] = Quiesce.TRY,
    schedule: Schedule = None,
    keep_last: Keep = None,
    keep_hourly: KeepHourly = None,
    keep_daily: KeepDaily = None,
    keep_weekly: KeepWeekly = None,
    keep_monthly: KeepMonthly = None,
    keep_yearly: KeepYearly = None,
) -> None:
    """Make a backup job; all points are kept where no --keep says else.

    Example: synvirt backup add-job web db --name nightly --repository here --schedule "0 2 * * *" --keep-daily 7
    """
    import json

    body: dict[str, Any] = {"name": name, "vm_ids": vms, "quiesce": quiesce.value}
    if schedule is not None and schedule != "never":
        body["schedule"] = schedule
    body["retention"] = _retention(keep_last, keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_yearly)
    with options.connect() as client:
        body["repository_id"] = id_of(client, REPOSITORIES, repository)
        answer = client.ask("POST", JOBS.path, json=body)
    made = json.loads(answer)
    when = f"It runs next at {at(made['next_run_at'])} UTC" if made["next_run_at"] else "Run it"
    print(answer if options.json else f"Job {made['id']} is made. {when}: synvirt backup run {made['id']}")


@app.command("change-job")
@with_options
def change_job(
    options: Options,
    job: Job,
    *,
    name: Annotated[str | None, typer.Option(help="What to call it")] = None,
    vm: Annotated[list[str] | None, typer.Option(help="Its guests, in place of those it has; may be given again")] = None,
    quiesce: Annotated[Quiesce | None, typer.Option(help="Freeze the file systems of a running guest")] = None,
    schedule: Schedule = None,
    keep_last: Keep = None,
    keep_hourly: KeepHourly = None,
    keep_daily: KeepDaily = None,
    keep_weekly: KeepWeekly = None,
    keep_monthly: KeepMonthly = None,
    keep_yearly: KeepYearly = None,
) -> None:
    """Change a backup job. What is not given stays; any --keep takes the place of all that it had.

    Example: synvirt backup change-job nightly --schedule never
    """
    kept = _retention(keep_last, keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_yearly)
    wishes = {"name": name, "vm_ids": vm or None, "quiesce": quiesce, "schedule": schedule, "retention": kept or None}
    body: dict[str, Any] = {wish: value for wish, value in wishes.items() if value is not None}
    if schedule == "never":
        body["schedule"] = None
    _ask(options, "PATCH", JOBS, job, json=body, said="is changed")


@app.command("remove-job")
@with_options
def remove_job(options: Options, job: Job) -> None:
    """Remove a backup job. Its restore points stay, and no retention touches them any more.

    Example: synvirt backup remove-job nightly
    """
    _ask(options, "DELETE", JOBS, job, said="is removed; its restore points stay")


@app.command()
@with_options
def retention(
    options: Options,
    job: Job,
    *,
    apply: Annotated[bool, typer.Option("--apply", help="Remove them now; each run of the job does so at its end")] = False,
    keep_last: Keep = None,
    keep_hourly: KeepHourly = None,
    keep_daily: KeepDaily = None,
    keep_weekly: KeepWeekly = None,
    keep_monthly: KeepMonthly = None,
    keep_yearly: KeepYearly = None,
) -> None:
    """Show which restore points of a job go, and why each of the others stays; with --keep, what these would do instead.

    Example: synvirt backup retention nightly --keep-daily 3
    """
    import json

    from synvirt.errors import BadRequest

    asked = _retention(keep_last, keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_yearly)
    if apply and asked:
        raise BadRequest("--apply removes by the job's own retention", hint="synvirt backup change-job changes that")
    with options.connect() as client:
        path = f"{JOBS.path}/{id_of(client, JOBS, job)}/retention"
        answer = client.ask("POST" if apply else "GET", path, params=asked)
    if options.json:
        print(answer)
    elif items := json.loads(answer)["items"]:
        _fates(items)
    else:
        print("The job has no restore points")


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
@with_options
def run(options: Options, job: Job) -> None:
    """Run a backup job, and watch it to its end. Ctrl-C stops the watching, not the run.

    Example: synvirt backup run nightly
    """
    _start(options, JOBS, job, "run")


@app.command()
@with_options
def runs(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """List the runs, newest first: backups, restores, verifications, boot tests, collections.

    Example: synvirt backup runs --limit 20
    """
    _list(options, RUNS, _runs, limit, cursor)


@app.command()
@with_options
def show(options: Options, run: Run) -> None:
    """Show one run: where it stands, what it read and stored, what it warns of.

    Example: synvirt backup show 1f3a
    """
    from synvirt.backups.model import BackupRun
    from synvirt.cli.backup_runs import sheet

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

    with options.connect() as client:
        if run is None:
            items = json.loads(client.ask("GET", RUNS.path))["items"]
            running = [item["id"] for item in items if item["finished_at"] is None]
            if not running:
                print("No run is under way")
                return
            run = running[-1]
        answer = client.ask("GET", f"{RUNS.path}/{id_of(client, RUNS, run)}")
        follow(options, client, answer, print_events=options.json)


@app.command()
@with_options
def cancel(options: Options, run: Run) -> None:
    """Ask a run to stop. What it stored stays for the next one; no restore point is made of it.

    Example: synvirt backup cancel 1f3a
    """
    _ask(options, "POST", RUNS, run, "/cancel", said="is asked to stop")


# ── restore points ───────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
@with_options
def points(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """List the restore points, newest first.

    Example: synvirt backup points
    """
    _list(options, POINTS, _points, limit, cursor)


@app.command()
@with_options
def verify(options: Options, point: Point) -> None:
    """Read all of a restore point, and hold it to what was backed up. Exit 1: it is damaged.

    Example: synvirt backup verify 1f3a
    """
    _start(options, POINTS, point, "verify")


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
    path: Annotated[Path | None, typer.Option(help="Export to a new folder in this one, not in {data_dir}/exports")] = None,
    format: Annotated[Format, typer.Option(help="Of exported disks")] = Format.RAW,
    disk: Annotated[list[str] | None, typer.Option(help="Only this disk (vda), and others so named")] = None,
    start: Annotated[bool, typer.Option("--start", help="Start the new guest when it is restored")] = False,
) -> None:
    """Restore a point: to files, to a new guest, or to the guest that it is of.

    Example: synvirt backup restore 1f3a --target new-domain --name web-again --start
    """
    body: dict[str, Any] = {"target": target.replace("-", "_"), "disks": disk or []}
    wishes = {"name": name, "path": None if path is None else str(path), "start": start or None}
    wishes["format"] = None if format == Format.RAW else format.value
    body |= {wish: value for wish, value in wishes.items() if value is not None}
    _start(options, POINTS, point, "restore", json=body)


@app.command("boot-test")
@with_options
def boot_test(options: Options, point: Point) -> None:
    """Start a restore point's guest beside the others, cut off from all networks, and see whether it boots.

    Example: synvirt backup boot-test 1f3a
    """
    _start(options, POINTS, point, "boot-test")


app.command()(mount)


@app.command()
@with_options
def protect(options: Options, point: Point) -> None:
    """Protect a restore point: neither retention nor anybody removes it.

    Example: synvirt backup protect 1f3a
    """
    _ask(options, "PATCH", POINTS, point, json={"protected": True}, said="is protected")


@app.command()
@with_options
def unprotect(options: Options, point: Point) -> None:
    """Take the protection off a restore point.

    Example: synvirt backup unprotect 1f3a
    """
    _ask(options, "PATCH", POINTS, point, json={"protected": False}, said="is protected no more")


@app.command("remove-point")
@with_options
def remove_point(options: Options, point: Point) -> None:
    """Remove a restore point. What only it needs is collected by a later run.

    Example: synvirt backup remove-point 1f3a
    """
    _ask(options, "DELETE", POINTS, point, said="is removed")


# ── tables: each fits into 80 columns ────────────────────────────────────────────────────────────────────────────────


def _repositories(items: list[Any]) -> None:
    rows = [(one["id"], shown(one["name"]), one["kind"], one["state"], str(one["points_count"]), _room(one)) for one in items]
    print_table(("ID", "NAME", "KIND", "STATE", "POINTS", "FREE"), rows)


def _room(one: dict[str, Any]) -> str:
    return "" if one["capacity_bytes"] is None else sized(max(0, one["capacity_bytes"] - (one["used_bytes"] or 0)))


def _jobs(items: list[Any]) -> None:
    rows = [
        (
            one["id"],
            shown(f"{one['name']}: {', '.join(one['vm_ids'])}"),
            shown(one["schedule"] or ""),
            at(one["next_run_at"])[:16] if one["next_run_at"] else "",
            (one["last_run_id"] or "")[:8],
        )
        for one in items
    ]
    print_table(("ID", "NAME", "SCHEDULE", "NEXT (UTC)", "LAST RUN"), rows)


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


def _fates(items: list[Any]) -> None:
    rows = [
        (
            one["restore_point_id"],
            shown(one["vm_name"]),
            at(one["created_at"])[:16],
            "goes" if one["removed"] else f"stays: {', '.join(line.removeprefix('keep_') for line in one['kept_by'])}",
        )
        for one in items
    ]
    print_table(("ID", "NAME", "CREATED", "RETENTION"), rows)
