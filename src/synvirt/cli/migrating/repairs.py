"""The output of `synvirt migrations repair`: the job that it began, and its findings."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import typer

from synvirt.cli.migrating.following import follow
from synvirt.cli.options import Options
from synvirt.cli.program import FAILED, shown
from synvirt.model.job import Migration
from synvirt.model.repair import DiskRepair, Span

# For each disk; the rest is in the JSON.
SHOWN_MOST: Final = 20


def repair_job(options: Options, client: Any, job_id: str, *, check_only: bool, watch: bool) -> None:
    """Asks for it; with `watch` to its end. Exits 1 then, where it failed, or something differs still."""
    answer = client.ask("POST", f"/migrations/{job_id}/repair", params={"check_only": check_only})
    made = Migration.model_validate_json(answer)
    if not watch:
        what = "compares" if check_only else "compares and repairs"
        notice = f"Job {made.id} {what} the volumes of job {job_id}. Watch it: synvirt migrations watch {made.id}"
        print(answer if options.json else notice)
        return
    follow(options, client, str(made.id))
    ended: Migration = client.migration(made.id)
    if not options.json:
        print(shown("\n".join(found_by(ended))))
    if ended.repair is None or not ended.repair.is_right:
        raise typer.Exit(FAILED)


def found_by(job: Migration) -> Iterator[str]:
    """A line for each disk and extent of a repair; none for another job."""
    if job.repair is None:
        return
    yield f"of job {job.repair.of}" + (", nothing is written" if job.repair.check_only else "")
    for disk in job.repair.disks:
        yield from _of_disk(disk, check_only=job.repair.check_only, ended=job.ended)


def _of_disk(disk: DiskRepair, *, check_only: bool, ended: bool) -> Iterator[str]:
    if not disk.differs:
        yield f"{disk.key}: " + ("holds what the receipt says" if ended else "nothing differs so far")
        return
    left = {(span.start, span.length) for span in disk.left}
    what = "differs from the receipt" if check_only else "differed from the receipt"
    yield from _named(disk.key, disk.differs, what)
    yield from _named(disk.key, disk.left, "was not repaired: the source does not hold what the receipt says")
    if not check_only and ended and not left:
        yield f"{disk.key}: all of it was repaired from the source"
    if disk.more:
        yield f"{disk.key}: there is more than is listed"


def _named(key: str, spans: Sequence[Span], what: str) -> Iterator[str]:
    for span in spans[:SHOWN_MOST]:
        yield f"{key}: {span.length} bytes at {span.start}: {what}"
    if len(spans) > SHOWN_MOST:
        yield f"{key}: {len(spans) - SHOWN_MOST} more extents: {what}"
