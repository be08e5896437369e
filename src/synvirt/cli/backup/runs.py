"""Follows a backup run by the stream: a bar on a terminal, lines elsewhere, and its result at the end."""

from typing import TYPE_CHECKING, Any

import typer

from synvirt.cli.listing import at
from synvirt.cli.program import FAILED, INTERRUPTED, print_error, print_sheet, say, shown
from synvirt.sizes import sized

if TYPE_CHECKING:
    from synvirt.backups.model import BackupRun
    from synvirt.cli.migrating.watching import Display
    from synvirt.cli.options import Options
    from synvirt.repository.verify import Report


def follow(options: "Options", client: Any, answer: str, *, print_events: bool = False) -> None:
    """Follows the run to its end; exits 1, if it is not completed. Ctrl-C leaves the run as it is. With --json: the stream's
    data as it comes, or else the ended run."""
    from synvirt.backups.model import BackupRun, Status
    from synvirt.cli.migrating.watching import display

    run = BackupRun.model_validate_json(answer)
    try:
        with display(quiet=options.json) as show:
            run = _watched(client, run, show, print_events=print_events)
    except KeyboardInterrupt:
        say(f"The run goes on. Watch it again: synvirt backup watch {run.id}", as_json=options.json)
        raise typer.Exit(INTERRUPTED) from None
    if not options.json:
        show_result(run)
    elif not print_events:
        print(client.ask("GET", f"/backup/runs/{run.id}"))
    if run.status != Status.COMPLETED:
        raise typer.Exit(FAILED)


def _watched(client: Any, run: "BackupRun", show: "Display", *, print_events: bool) -> "BackupRun":
    """The stream of one run begins with that run, also after it has ended."""
    from synvirt.backups.model import ENDS, BackupRun, RunUpdate
    from synvirt.cli.client import RUNS
    from synvirt.errors import Internal

    warned, trouble = 0, None
    for event in client.follow(RUNS, job_id=run.id, on_lost=lambda: show.line("the service does not answer; waiting for it")):
        if print_events:
            print(event.data, flush=True)
        if event.event == "run":
            run = BackupRun.model_validate_json(event.data)
            show.stands(str(run.status), f"{run.kind.replace('_', ' ')} {str(run.id)[:8]}", run.progress)
            for warning in run.warnings[warned:]:
                show.line(f"{warning.code}: {warning.message}")
            warned = len(run.warnings)
            if run.status in ENDS:
                return run
            if run.error is not None and run.error != trouble:
                show.line(f"{run.error.code}: {run.error.message}")
            trouble = run.error
        elif event.event == "progress":
            show.progressed(RunUpdate.model_validate_json(event.data).progress)
    raise Internal("the stream ended without the run")


def show_result(run: "BackupRun") -> None:
    """Prints the run's result."""
    if run.error is not None:
        print_error(run.error.code, run.error.message, run.error.hint)
    # A backup that fails has made points of some guests; of any other run they are what it was to work on.
    if run.kind == "backup" or run.error is None:
        for point in run.restore_point_ids:
            print(f"restore point {point}")
    if run.kind == "backup" and (run.stored_bytes or run.restore_point_ids):
        print(f"{sized(run.progress.bytes_done)} read, {sized(run.stored_bytes)} stored")
    if run.report is not None:
        _show_report(run.report)
    if run.collected is not None:
        gone, later = run.collected.bytes_deleted, run.collected.bytes_condemned
        print(f"{sized(gone)} in {run.collected.packs_deleted} packs are removed")
        print(f"{sized(later)} in {run.collected.packs_condemned} packs go in a day, if nothing needs them by then")
    if run.path is not None and run.error is None:
        print(f"in {shown(run.path)}" + ("" if run.path.startswith("/") else " of the service's data folder"))
    if run.domain is not None and run.error is None:
        print(f"domain {shown(run.domain.name)} ({run.domain.uuid})")


def _show_report(report: "Report") -> None:
    print(f"{report.packs} packs and {report.points} restore points, {sized(report.bytes_read)} read")
    for wrong in report.wrongs:
        print(shown(wrong))
    if report.more_wrongs:
        print(f"and {report.more_wrongs} more")


def sheet(run: "BackupRun") -> None:
    """All fields of one run, a line each."""
    from synvirt.backups.model import ENDS
    from synvirt.cli.migrating.watching import described

    rows = [("id", str(run.id)), ("kind", run.kind.replace("_", " ")), ("status", str(run.status)), ("trigger", run.trigger)]
    rows += [("asked by", str(run.submitted_by))] if run.submitted_by else []
    rows += [("job", str(run.job_id))] if run.job_id else []
    rows += [("created", at(run.created_at))]
    rows += [("finished", at(run.finished_at))] if run.finished_at else []
    rows += [("progress", described(run.progress, ended=run.status in ENDS))]
    for guest in run.guests:
        froze = f", frozen for {guest.freeze_ms} ms" if guest.freeze_ms is not None else ""
        read = sum(disk.read_bytes for disk in guest.disks)
        rows.append(("guest", f"{guest.vm_name}: {guest.way}, {sized(read)} read{froze}"))
    rows += [("instant", run.instant.state)] if run.instant else []
    rows += [("warning", f"{one.code}: {one.message}") for one in run.warnings]
    print_sheet(rows)
    show_result(run)
