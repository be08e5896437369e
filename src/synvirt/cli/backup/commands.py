"""synvirt backup: repositories, jobs, runs and restore points."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from synvirt.cli.backup import things as backup_things
from synvirt.cli.backup.asking import (
    JOBS,
    POINTS,
    REPOSITORIES,
    RUNS,
    Job,
    Point,
    Repository,
    Run,
    ask,
    list_things,
    start_run,
)
from synvirt.cli.backup.jobs import add_job, change_job, jobs, remove_job, retention
from synvirt.cli.backup.mount import mount
from synvirt.cli.backup.offers import offers, release_point, show_offer
from synvirt.cli.backup.runs import follow
from synvirt.cli.listing import Cursor, Limit, at, id_of, print_table
from synvirt.cli.options import Options, size_given, with_options
from synvirt.cli.program import shown
from synvirt.cli.secret import secret
from synvirt.sizes import sized

app = typer.Typer(no_args_is_help=True, help="Backups of this host's guests: docs/backup.md.")


OfJob = Annotated[str | None, typer.Option("--job", help="Only those of this backup job: its name or id")]


class Target(StrEnum):
    """What a restore makes."""

    EXPORT = "export"
    NEW_DOMAIN = "new-domain"
    IN_PLACE = "in-place"


class BoundTo(StrEnum):
    """What a copy of a key is bound to."""

    HOST = "host"
    TPM2 = "tpm2"


class Format(StrEnum):
    """The format of exported disks."""

    RAW = "raw"
    QCOW2 = "qcow2"


# ── repositories ─────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
@with_options
def repositories(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """List the repositories.

    Example: synvirt backup repositories
    """
    list_things(options, REPOSITORIES, _repositories, limit, cursor)


@app.command("add-repository")
@with_options
def add_repository(
    options: Options,
    folder: Annotated[Path | None, typer.Argument(metavar="[FOLDER]", help="A folder of the service's host")] = None,
    *,
    name: Annotated[str, typer.Option(help="Its name")],
    nfs: Annotated[bool, typer.Option("--nfs", help="An NFS export must be mounted there")] = False,
    peer: Annotated[
        str | None, typer.Option(metavar="URL", help="The address of another SynVirt's backup offer, in place of a folder")
    ] = None,
    fingerprint: Annotated[str | None, typer.Option(help="SHA-256 of the peer's certificate")] = None,
    peer_user: Annotated[
        str, typer.Option(help="The offer's account; the password: env SYNVIRT_PEER_PASSWORD, or asked for")
    ] = "",
    existing: Annotated[
        bool,
        typer.Option(
            "--existing",
            help="Use an existing repository; its recovery key, or a sealed copy: env SYNVIRT_RECOVERY_KEY, or asked for",
        ),
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
        password = secret("The peer's password", variable="SYNVIRT_PEER_PASSWORD")
        account = {"username": peer_user, "password": password}
        body["peer"] = {"url": peer, "fingerprint_sha256": fingerprint or "", "credentials": account}
    if existing:
        key = secret("Recovery key", variable="SYNVIRT_RECOVERY_KEY")
        body["recovery_key"] = key
        if key.strip().startswith("synvirt-key-1:scrypt:"):
            body["passphrase"] = secret("Passphrase", variable="SYNVIRT_PASSPHRASE")
    with options.connect() as client:
        answer = client.ask("POST", REPOSITORIES.path, json=body)
        made = json.loads(answer)
        key = json.loads(client.ask("GET", f"{REPOSITORIES.path}/{made['id']}/recovery-key"))["recovery_key"]
    print(answer if options.json else f"Repository {made['id']} is ready. Keep its recovery key elsewhere than here:\n{key}")


@app.command("recovery-key")
@with_options
def recovery_key(options: Options, repository: Repository) -> None:
    """Print a repository's recovery key: with it and the folder, the backups can be read without this host.

    Example: synvirt backup recovery-key here
    """
    import json

    with options.connect() as client:
        answer = client.ask("GET", f"{REPOSITORIES.path}/{id_of(client, REPOSITORIES, repository)}/recovery-key")
    print(answer if options.json else json.loads(answer)["recovery_key"])


@app.command("change-key")
@with_options
def change_key(options: Options, repository: Repository) -> None:
    """Give a repository a new key, and print its recovery key. What is there opens with the new one too.

    Example: synvirt backup change-key here
    """
    import json

    with options.connect() as client:
        answer = client.ask("POST", f"{REPOSITORIES.path}/{id_of(client, REPOSITORIES, repository)}/change-key")
    notice = "What is written from now on opens only with this recovery key. Keep it elsewhere than here:"
    print(answer if options.json else f"{notice}\n{json.loads(answer)['recovery_key']}")


@app.command("seal-key")
@with_options
def seal_key(
    options: Options,
    repository: Repository,
    bound_to: Annotated[
        BoundTo | None, typer.Option(help="By systemd-creds: opens only on this host, or only with its TPM")
    ] = None,
) -> None:
    """Print a copy of a repository's key that a passphrase opens: env SYNVIRT_PASSPHRASE, or asked for.

    Example: synvirt backup seal-key here > here.key
    """
    import json

    body = (
        {"bound_to": bound_to.value}
        if bound_to is not None
        else {"passphrase": secret("Passphrase", variable="SYNVIRT_PASSPHRASE", confirm=True)}
    )
    with options.connect() as client:
        path = f"{REPOSITORIES.path}/{id_of(client, REPOSITORIES, repository)}/sealed-key"
        answer = client.ask("POST", path, json=body)
    print(answer if options.json else json.loads(answer)["sealed_key"])


@app.command("verify-repository")
@with_options
def verify_repository(options: Options, repository: Repository) -> None:
    """Read a whole repository, and compare it with its hashes. Exit 1: something in it is damaged.

    Example: synvirt backup verify-repository here
    """
    start_run(options, REPOSITORIES, repository, "verify")


@app.command("collect")
@with_options
def collect(
    options: Options,
    repository: Repository,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only count")] = False,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="SIZE", help="At most this much is read per second, for example 50MiB")
    ] = None,
) -> None:
    """Remove what no restore point needs, in two steps a day apart; each backup run does so at its end.

    Example: synvirt backup collect here --dry-run
    """
    params = {"dry_run": dry_run, "bandwidth_bps": size_given(bandwidth, "--bandwidth")}
    start_run(options, REPOSITORIES, repository, "collect", params=params)


@app.command("forget-repository")
@with_options
def forget_repository(options: Options, repository: Repository) -> None:
    """Forget a repository that no job writes to. Its content stays: add it again with its recovery key.

    Example: synvirt backup forget-repository here
    """
    ask(options, "DELETE", REPOSITORIES, repository, outcome="is forgotten; its content stays")


app.command()(offers)
app.command("show-offer")(show_offer)
app.command("release-point")(release_point)


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

app.command()(jobs)
app.command("add-job")(add_job)
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
app.command("show-job")(backup_things.show_job)
app.command("show-point")(backup_things.show_point)
app.command("show-repository")(backup_things.show_repository)
app.command("remove-run")(backup_things.remove_run)
app.command("screenshot")(backup_things.screenshot)


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


def _repositories(items: list[Any]) -> None:
    rows = [(one["id"], shown(one["name"]), one["kind"], one["state"], str(one["points_count"]), _room(one)) for one in items]
    print_table(("ID", "NAME", "KIND", "STATE", "POINTS", "FREE"), rows)
    for one in items:
        if one["problem"]:
            print(shown(f"{one['name']}: {one['problem']}"))


def _room(one: dict[str, Any]) -> str:
    return "" if one["capacity_bytes"] is None else sized(max(0, one["capacity_bytes"] - (one["used_bytes"] or 0)))


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
