"""Shows or removes one thing of the backups: synvirt backup show-job, show-point, show-repository, remove-run …"""

from pathlib import Path
from typing import Annotated

import typer

from synvirt.cli.backup.asking import JOBS, POINTS, REPOSITORIES, RUNS, Job, Point, Repository, Run, ask
from synvirt.cli.listing import Listed, id_of
from synvirt.cli.options import Options, with_options
from synvirt.cli.pictures import save
from synvirt.cli.program import print_sheet, value_text


@with_options
def show_job(options: Options, job: Job) -> None:
    """Show one backup job.

    Example: synvirt backup show-job nightly
    """
    _show(options, JOBS, job)


@with_options
def show_point(options: Options, point: Point) -> None:
    """Show one restore point.

    Example: synvirt backup show-point 1f3a
    """
    _show(options, POINTS, point)


@with_options
def show_repository(options: Options, repository: Repository) -> None:
    """Show one repository.

    Example: synvirt backup show-repository nas
    """
    _show(options, REPOSITORIES, repository)


@with_options
def remove_run(options: Options, run: Run) -> None:
    """Remove an ended run from the list. Its restore points stay.

    Example: synvirt backup remove-run 77c0
    """
    ask(options, "DELETE", RUNS, run, outcome="is removed")


@with_options
def screenshot(
    options: Options, point: Point, file: Annotated[Path, typer.Argument(metavar="FILE.png", help="Where it is written")]
) -> None:
    """Save the screen of a restore point's last boot test.

    Example: synvirt backup screenshot 1f3a screen.png
    """
    with options.connect() as client:
        save(options, client, f"{POINTS.path}/{id_of(client, POINTS, point)}/screenshot", file)


def _show(options: Options, listed: Listed, one: str) -> None:
    import json

    with options.connect() as client:
        answer = client.ask("GET", f"{listed.path}/{id_of(client, listed, one)}")
    if options.json:
        print(answer)
        return
    print_sheet((name, value_text(value)) for name, value in json.loads(answer).items())
