"""Watches jobs to their end, and makes the exit code of the command: for every command that begins jobs."""

from typing import Any

import typer

from synvirt.cli.options import Options
from synvirt.cli.program import FAILED, INTERRUPTED, say


def follow(options: Options, client: Any, job_id: str, *, print_events: bool = False) -> None:
    """Watches the job to its end; exits 1, if it failed. With --json: the stream's data as it comes, or else the ended job."""
    from synvirt.cli.migrating.watching import display, verdict, watch

    try:
        with display(quiet=options.json) as shows:
            each = (lambda event: print(event.data, flush=True)) if print_events else (lambda _: None)
            job = watch(client, client.migration(job_id), show=shows, each=each)
    except KeyboardInterrupt:
        say(f"The job goes on. Watch it again: synvirt migrations watch {job_id}", as_json=options.json)
        raise typer.Exit(INTERRUPTED) from None
    if options.json and not print_events:
        print(client.ask("GET", f"/migrations/{job_id}"))
    if not verdict(job):
        raise typer.Exit(FAILED)


def follow_several(options: Options, client: Any, ids: list[str]) -> None:
    """The same for the jobs `ids`; empty: all that run."""
    from synvirt.cli.migrating.watching import verdict
    from synvirt.cli.migrating.watching_several import watch_several

    try:
        ended = watch_several(client, ids, as_json=options.json)
    except KeyboardInterrupt:
        say(f"The jobs go on. Watch them again: synvirt migrations watch {' '.join(ids)}".rstrip(), as_json=options.json)
        raise typer.Exit(INTERRUPTED) from None
    if not ended and not options.json:
        print("No migration runs")
    verdicts = [verdict(job) for job in ended]  # each failure, not only the first
    if not all(verdicts):
        raise typer.Exit(FAILED)
