"""synvirt backup jobs|add-job|change-job|remove-job|retention"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from synvirt.cli.backup.asking import JOBS, REPOSITORIES, Job, ask, list_things, show_thing
from synvirt.cli.listing import Cursor, Limit, at, id_of, print_table
from synvirt.cli.options import Options, size_given, with_options
from synvirt.cli.program import shown


class Quiesce(StrEnum):
    """Whether a job freezes the guest's file systems."""

    OFF = "off"
    TRY = "try"
    REQUIRE = "require"


@with_options
def jobs(options: Options, limit: Limit = 1000, cursor: Cursor = None) -> None:
    """List the backup jobs.

    Example: synvirt backup jobs
    """
    list_things(options, JOBS, _jobs, limit, cursor)


Bandwidth = Annotated[
    str | None, typer.Option(metavar="SIZE", help="At most this much is read per second, for example 50MiB; «none»: no limit")
]
Schedule = Annotated[str | None, typer.Option(help="Schedule: five fields of cron, in UTC; «never»: no schedule")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many restore points of each period stay; None: no such line."""

    keep_last: Annotated[int | None, typer.Option(min=0, help="Keep this many of the newest points")] = None
    keep_hourly: Annotated[int | None, typer.Option(min=0, help="… the last one of this many hours")] = None
    keep_daily: Annotated[int | None, typer.Option(min=0, help="… of this many days")] = None
    keep_weekly: Annotated[int | None, typer.Option(min=0, help="… of this many weeks")] = None
    keep_monthly: Annotated[int | None, typer.Option(min=0, help="… of this many months")] = None
    keep_yearly: Annotated[int | None, typer.Option(min=0, help="… of this many years")] = None

    def given(self) -> dict[str, int]:
        return {line: count for line, count in asdict(self).items() if count is not None}


def _rate(text: str) -> int | None:
    """Bytes a second; None: no limit."""
    return None if text == "none" else size_given(text, "--bandwidth")


@with_options
def add_job(
    options: Options,
    vms: Annotated[list[str], typer.Argument(metavar="VM...", help="Names or UUIDs of this host's guests")],
    *,
    name: Annotated[str, typer.Option(help="Its name")],
    repository: Annotated[str, typer.Option(help="The repository's name or id")],
    quiesce: Annotated[
        Quiesce, typer.Option(help="Freeze the file systems of a running guest at the moment of the backup")
    ] = Quiesce.TRY,
    schedule: Schedule = None,
    bandwidth: Bandwidth = None,
    keep: Retention,
) -> None:
    """Make a backup job; all points are kept where no --keep says else. Snapshots of the guests are not backed up.

    Example: synvirt backup add-job web db --name nightly --repository here --schedule "0 2 * * *" --keep-daily 7
    """
    import json

    body: dict[str, Any] = {"name": name, "vm_ids": vms, "quiesce": quiesce.value}
    if schedule is not None and schedule != "never":
        body["schedule"] = schedule
    if bandwidth is not None:
        body["bandwidth_bps"] = _rate(bandwidth)
    body["retention"] = keep.given()
    with options.connect() as client:
        body["repository_id"] = id_of(client, REPOSITORIES, repository)
        answer = client.ask("POST", JOBS.path, json=body)
    made = json.loads(answer)
    when = f"It runs next at {at(made['next_run_at'])}" if made["next_run_at"] else "Run it"
    print(answer if options.json else f"Job {made['id']} is made. {when}: synvirt backup run {made['id']}")


@with_options
def show_job(options: Options, job: Job) -> None:
    """Show one backup job.

    Example: synvirt backup show-job nightly
    """
    show_thing(options, JOBS, job)


@with_options
def change_job(
    options: Options,
    job: Job,
    *,
    name: Annotated[str | None, typer.Option(help="Its name")] = None,
    vm: Annotated[list[str] | None, typer.Option(help="Its guests, in place of those it has; may be given again")] = None,
    quiesce: Annotated[Quiesce | None, typer.Option(help="Freeze the file systems of a running guest")] = None,
    schedule: Schedule = None,
    bandwidth: Bandwidth = None,
    keep: Retention,
) -> None:
    """Change a backup job. What is not given stays; any --keep takes the place of all that it had.

    Example: synvirt backup change-job nightly --schedule never
    """
    kept = keep.given()
    fields = {"name": name, "vm_ids": vm or None, "quiesce": quiesce, "schedule": schedule, "retention": kept or None}
    body: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if schedule == "never":
        body["schedule"] = None
    if bandwidth is not None:
        body["bandwidth_bps"] = _rate(bandwidth)
    ask(options, "PATCH", JOBS, job, json=body, outcome="is changed")


@with_options
def remove_job(options: Options, job: Job) -> None:
    """Remove a backup job. Its restore points stay, and no retention touches them any more.

    Example: synvirt backup remove-job nightly
    """
    ask(options, "DELETE", JOBS, job, outcome="is removed; its restore points stay")


@with_options
def retention(
    options: Options,
    job: Job,
    *,
    apply: Annotated[bool, typer.Option("--apply", help="Remove them now; each run of the job does so at its end")] = False,
    keep: Retention,
) -> None:
    """Show which restore points of a job go, and why each of the others stays; with --keep, what these would do instead.

    Example: synvirt backup retention nightly --keep-daily 3
    """
    import json

    from synvirt.errors import BadRequest

    asked = keep.given()
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
    print_table(("ID", "NAME", "SCHEDULE", "NEXT", "LAST RUN"), rows)


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
