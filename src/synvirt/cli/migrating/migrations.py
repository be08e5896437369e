"""synvirt migrations list|show|watch|submit|cancel|cutover|retry|repair|take-over|remove"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synvirt.cli.listing import Cursor, at, full_id, print_table
from synvirt.cli.migrating.following import follow, follow_several
from synvirt.cli.options import Options, confirm, with_options
from synvirt.cli.program import print_sheet, shown

if TYPE_CHECKING:
    from synvirt.model.job import Forecast, Migration, OutageForecast, Pass

app = typer.Typer(no_args_is_help=True, help="The jobs of the service.")

PASSES_SHOWN = 10

JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's name, its id, or the id's beginning")]


@app.command("list")
@with_options
def list_(
    options: Options,
    *,
    limit: Annotated[int, typer.Option(min=1, max=5000, help="At most this many")] = 5000,
    cursor: Cursor = None,
    state: Annotated[list[str] | None, typer.Option(help="Only jobs in this state, such as Failed; may be repeated")] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name")] = None,
    source_id: Annotated[str | None, typer.Option(help="Only jobs of this source: its id")] = None,
    wave_id: Annotated[str | None, typer.Option(help="Only jobs of this wave: its id")] = None,
    host: Annotated[str | None, typer.Option(help="Only jobs that this host has: its id")] = None,
) -> None:
    """List the jobs, newest first.

    Example: synvirt migrations list --state Failed --limit 20
    """
    import json

    with options.connect() as client:
        of = {"state": state, "name": name, "source_id": source_id, "wave_id": wave_id, "host": host}
        asked = {"limit": limit, "cursor": cursor} | of
        answer = client.ask("GET", "/migrations", params=asked)
    if options.json:
        print(answer)
        return
    page = json.loads(answer)
    _table(page["items"])
    if page["next_cursor"]:
        print(f"There are more: --cursor {page['next_cursor']}")


@app.command()
@with_options
def show(options: Options, job: JobId) -> None:
    """Show one job: its state, what it made, and its history.

    Example: synvirt migrations show 1f3a
    """
    with options.connect() as client:
        answer = client.ask("GET", f"/migrations/{full_id(client, 'migration', job)}")
        if options.json:
            print(answer)
        else:
            _sheet(answer, lambda host: _lost(client, host))


@app.command()
@with_options
def watch(
    options: Options,
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Jobs; none: all that have not ended")] = None,
) -> None:
    """Watch a job, or several in one table, to their ends. Ctrl-C stops the watching, not the jobs.

    Exit 1: one of them failed.

    Example: synvirt migrations watch

    Example: synvirt migrations watch 1f3a 77c0
    """
    with options.connect() as client:
        ids = [full_id(client, "migration", job) for job in jobs or ()]
        if len(ids) == 1:
            follow(options, client, ids[0], print_events=options.json)
        else:
            follow_several(options, client, ids)


@app.command()
@with_options
def screenshot(
    options: Options, job: JobId, file: Annotated[Path, typer.Argument(metavar="FILE.png", help="Where it is written")]
) -> None:
    """Save the guest's screen of the moment when the job gave up on it.

    Example: synvirt migrations screenshot 1f3a screen.png
    """
    from synvirt.cli.pictures import save

    with options.connect() as client:
        save(options, client, f"/migrations/{full_id(client, 'migration', job)}/screenshot", file)


@app.command("dry-run")
@with_options
def dry_run(
    options: Options,
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan as JSON, as POST /migrations takes it; - is stdin")],
) -> None:
    """Show how a plan would run, and what is wrong with it. No job is created. Exit 1: something is wrong.

    Example: synvirt migrations dry-run web01.json
    """
    from synvirt.cli.json_files import sent_from
    from synvirt.cli.migrating.dry_runs import plan_in, show_dry_run

    asked = plan_in(plan)
    with options.connect() as client, sent_from(plan):
        show_dry_run(options, client, asked)


@app.command()
@with_options
def submit(
    options: Options,
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan as JSON, as POST /migrations takes it; - is stdin")],
) -> None:
    """Make a job of a plan in a file, with any field that a plan has. synvirt import takes the usual ones as options.

    Example: synvirt migrations submit web01.json
    """
    import json

    from synvirt.cli.json_files import sent_from
    from synvirt.cli.migrating.dry_runs import plan_in

    asked = plan_in(plan)
    with options.connect() as client, sent_from(plan):
        answer = client.ask("POST", "/migrations", json={"plan": asked})
    made = json.loads(answer)["id"]
    print(answer if options.json else f"Job {made} is queued. Watch it: synvirt migrations watch {made}")


@app.command()
@with_options
def cancel(
    options: Options,
    job: JobId,
    lose_guest_writes: Annotated[
        bool,
        typer.Option("--lose-guest-writes", help="Of an instant start: stop its guest too, and lose what it wrote since"),
    ] = False,
) -> None:
    """Ask a job to stop, and to remove what it made.

    Example: synvirt migrations cancel 1f3a
    """
    _ask(options, job, "cancel?guest_writes=lose" if lose_guest_writes else "cancel", "is asked to stop")


@app.command()
@with_options
def cutover(options: Options, job: JobId) -> None:
    """Make a job that waits for it (warm.cutover manual) cut over now.

    Example: synvirt migrations cutover 1f3a
    """
    _ask(options, job, "cutover", "is asked to cut over")


@app.command()
@with_options
def retry(
    options: Options,
    job: JobId,
    conversion: Annotated[str | None, typer.Option(help="auto, always or never, in place of the plan's")] = None,
    disk_bus: Annotated[str | None, typer.Option(help="virtio, scsi, sata …, in place of the plan's")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="A field of the plan, target.name=web2 for example; VALUE may be JSON"
        ),
    ] = None,
) -> None:
    """Try a failed job again, with another plan where that was wrong. Where its volumes were kept, a new job goes on with them:
    an Offline one copies nothing, a Live one compares whole disks and writes what differs. Else it starts over.

    Example: synvirt migrations retry 1f3a --disk-bus sata --set target.start=false
    """
    import json

    from synvirt.cli.migrating.dry_runs import patch_of

    changes = {"conversion": conversion, "disk_bus": disk_bus}
    patch = patch_of(change or [])
    with options.connect() as client:
        path = f"/migrations/{full_id(client, 'migration', job)}/retry"
        answer = client.ask("POST", path, params=changes, json={"plan": patch} if patch else None)
    if options.json:
        print(answer)
    else:
        found = json.loads(answer)
        print(f"Job {found['id']} " + (f"goes on with the copy of job {job}" if found["retry_of"] else "starts over"))


@app.command()
@with_options
def repair(
    options: Options,
    job: JobId,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Report what differs; write nothing, and do not read the source")
    ] = False,
    watch_it: Annotated[bool, typer.Option("--watch", help="Wait for its end, and print the result")] = False,
) -> None:
    """Compare the volumes of a completed job with its receipt, and repair what differs from their source. Only of a guest that
    was never started: what a guest writes differs, too.

    Exit 1: it failed, or something differs still (with --watch).

    Example: synvirt migrations repair 1f3a --check-only --watch
    """
    from synvirt.cli.migrating.repairs import repair_job

    with options.connect() as client:
        repair_job(options, client, full_id(client, "migration", job), check_only=check_only, watch=watch_it)


@app.command("take-over")
@with_options
def take_over(
    options: Options,
    job: JobId,
    restart: Annotated[bool, typer.Option("--restart", help="Start over here, with new volumes")] = False,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask: the job's host and its guests are off")] = False,
) -> None:
    """Go on here with the job of a host that is fenced.

    Before its cut-over a job on shared storage is taken over by itself. Example: synvirt migrations take-over 1f3a
    """
    confirm(options, f"Is the host of job {job} off, and are its guests?", sure=sure)
    with options.connect() as client:
        answer = client.ask("POST", f"/migrations/{full_id(client, 'migration', job)}/take-over", params={"restart": restart})
    if options.json:
        print(answer)
    else:
        import json

        print(f"Job {json.loads(answer)['id']} {'starts over' if restart else 'goes on'} here")


@app.command()
@with_options
def remove(
    options: Options,
    job: JobId,
    volumes: Annotated[
        str | None, typer.Option(help="keep or destroy: what happens to the volumes that a failed job kept")
    ] = None,
) -> None:
    """Remove an ended job from the list.

    Example: synvirt migrations remove 1f3a --volumes destroy
    """
    with options.connect() as client:
        client.ask("DELETE", f"/migrations/{full_id(client, 'migration', job)}", params={"volumes": volumes})
    if not options.json:
        print(f"Job {job} is removed")


def _ask(options: Options, job: str, wish: str, answered: str) -> None:
    from synvirt.cli.migrating.dry_runs import speaking_as_options

    with options.connect() as client, speaking_as_options():
        answer = client.ask("POST", f"/migrations/{full_id(client, 'migration', job)}/{wish}")
    print(answer if options.json else f"Job {job} {answered}")


def _table(items: list[dict[str, Any]]) -> None:
    from synvirt.sizes import sized

    if not items:
        print("There are no migrations")
        return
    several = any(item.get("host") not in (None, "local") for item in items)
    rows = []
    for item in items:
        # A job that another version on another host has written may lack anything but its id.
        progress = item.get("progress") or {}
        total = progress.get("bytes_total")
        done = f"{sized(progress.get('bytes_done', 0))} of {sized(total)}" if total else ""
        state = item.get("state", "?") + (" (repair)" if item.get("repair") else "")
        host = (shown(item.get("host") or ""),) if several else ()
        rows.append((item["id"], shown(item.get("name", "?")), state, *host, done, at(item.get("created_at", ""))))
    print_table(("ID", "NAME", "STATE", *(("HOST",) if several else ()), "DONE", "CREATED"), rows)


def _lost(client: Any, host: str) -> str | None:
    """The state of a host that does nothing for its jobs now; None: it is alive."""
    import json

    known = json.loads(client.ask("GET", "/hosts", params={"limit": 1000}))["items"]
    return next((one["state"] for one in known if one["id"] == host and one["state"] != "alive"), None)


def _sheet(answer: str, lost: Callable[[str], str | None]) -> None:
    from synvirt.cli.migrating.dry_runs import as_options
    from synvirt.cli.migrating.repairs import found_by
    from synvirt.cli.migrating.watching import described, held_until, outcome
    from synvirt.model.job import Migration
    from synvirt.sizes import sized

    job = Migration.model_validate_json(answer)
    rows = [("id", str(job.id)), ("name", job.name), ("state", str(job.state))]
    if job.repair is None:
        planned = f" (planned {job.plan.mode})" if job.mode_effective != job.plan.mode else ""
        rows.append(("mode", f"{job.mode_effective}{planned}"))
    rows += [("by", str(job.submitted_by))] if job.submitted_by else []
    if job.host not in (None, "local"):
        state = None if job.host is None or job.ended else lost(job.host)
        waits = "" if state is None else f" ({state}: the job waits for it, or for a take-over; synvirt hosts list)"
        rows.append(("host", f"{job.host}{waits}"))
        if waits:  # it copies nothing: its newest figures are of the moment before
            job = job.model_copy(update={"progress": job.progress.stopped()})
    rows += [("attempt", str(job.attempt))] if job.attempt > 1 else []
    others = ((words, getattr(job, field)) for field, words in _OTHER_JOBS)
    rows += [("job", words.format(other)) for words, other in others if other not in (None, job.id)]
    if job.retried_by == job.id:
        rows.append(("job", "is being removed with its volumes; if that was interrupted, remove it again"))
    if job.last_error is not None:
        rows.append(
            ("error" if job.last_error.fatal else "note", f"{job.last_error.code}: {as_options(job.last_error.message)}")
        )
        rows += [("hint", as_options(job.last_error.hint))] if job.last_error.hint else []
    rows += [("instant", job.instant.state)] if job.instant is not None else []
    if job.progress.bytes_total or not job.ended:
        rows.append(("progress", described(job.progress, state=job.state, ended=job.ended)))
    rows += [("pass", line) for line in _passes(job)]
    rows += [("lost", shown(job.distrusted))] if job.distrusted is not None else []
    if job.forecast is not None and not job.ended:
        rows.append(("forecast", _forecast(job.forecast)))
    rows += [("outage", _outage(job.outage))] if job.outage is not None else []
    rows += [("downtime", f"{job.downtime_s:.1f} s")] if job.downtime_s is not None else []
    rows += [("held", held_until(job))] if job.held else []
    rows += [
        ("disk", f"{disk.key} {disk.label}: {job.disk_words(disk)}, {sized(disk.bytes_total)}, {disk.volume or '-'}")
        for disk in job.disks
    ]
    rows += [("domain", f"{job.domain.name} {job.domain.uuid}")] if job.domain else []
    if job.domain:
        rows += [
            ("differs", f"{one.what}: {one.source} → {one.here} ({as_options(one.why)})") for one in job.domain.differences
        ]
    if job.moved:
        rows.append(("moved", f"{job.moved.same} facts as at the source, {len(job.moved.differ)} differ"))
        shown_ones = (one for one in job.moved.differ if one.grade in ("wrong", "look"))
        rows += [
            (one.grade, f"{one.item}: {one.source or 'nothing'} → {one.clone or 'nothing'} ({one.reason})")
            for one in shown_ones
        ]
    rows += [("boot", f"{attempt.disk_bus}: {outcome(attempt)}") for attempt in job.boot_attempts]
    rows += [("repair", line) for line in found_by(job)]
    rows += [("history", f"{at(visit.at)} {visit.state}") for visit in job.history]
    print_sheet(rows)


# The jobs before and after it, by the fields that name them.
_OTHER_JOBS = (
    ("retry_of", "goes on with the copy of job {}"),
    ("restart_of", "starts over job {}, whose host was lost"),
    ("retried_by", "job {} goes on with its copy"),
    ("restarted_by", "job {} starts it over on another host"),
)


def _passes(job: "Migration") -> list[str]:
    """The first and the last of them: a job that is held for a week has thousands."""
    few = len(job.passes) <= PASSES_SHOWN
    shown_ = job.passes if few else (job.passes[0], *job.passes[1 - PASSES_SHOWN :])
    lines = [_pass(one, job.plan.warm.confidence, ended=job.ended) for one in shown_]
    return lines if few else [lines[0], f"… {len(job.passes) - PASSES_SHOWN} more", *lines[1:]]


def _pass(one: "Pass", confidence: float, *, ended: bool) -> str:
    from synvirt.sizes import sized

    line = f"{one.number} {one.kind}: {sized(one.bytes)} in {one.seconds:.1f} s"
    if one.would_see is not None:
        seen = (
            "all" if one.verify else f"sees with {100 * confidence:.6g} % certainty that {one.would_see:.2%} or more were lost"
        )
        line += f", {sized(one.bytes_checked)} of the unchanged compared ({seen})"
    stands = "" if one.finished_at is not None else ", stopped" if ended else ", under way"
    return line + (", whole disks compared" if one.whole else "") + stands


def _outage(one: "OutageForecast") -> str:
    parts = ", ".join(f"{part.name} {part.p50_s:.0f} to {part.p95_s:.0f} s" for part in one.parts)
    allowed = "" if one.budget_s is None else f", {one.budget_s:.0f} s allowed"
    return f"{one.p50_s:.0f} s, {one.p95_s:.0f} s with 95 % certainty{allowed} ({parts})"


def _forecast(one: "Forecast") -> str:
    from synvirt.sizes import sized

    if not one.converges:
        return f"{sized(one.change_rate_bps)}/s change, {sized(one.throughput_bps)}/s are copied: it will not become less"
    downtime = f"{one.expected_downtime_s:.1f} s beside shutting down and starting"
    return f"{sized(one.change_rate_bps)}/s change; a cut-over copies {sized(one.expected_delta_bytes)}, in {downtime}"
