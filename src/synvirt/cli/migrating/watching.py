"""Watches a job by the stream: progress bars on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from synvirt.cli.migrating.dry_runs import as_options
from synvirt.cli.program import print_error, shown
from synvirt.errors import Internal
from synvirt.model.job import BootAttempt, DiskProgress, HeldFor, Migration, Progress, ProgressUpdate
from synvirt.model.kinds import State
from synvirt.model.problems import Problem
from synvirt.sizes import duration, percent, sized

if TYPE_CHECKING:
    from rich.progress import TaskID

    from synvirt.cli.client import Client, StreamEvent

# For people who read a log: a line at each tenth, or after this long without a line.
LINES_A_COPY = 10
LINE_EVERY_S = 10.0


def stage(job: Migration) -> str:
    """Its state in words: if the guest will not be started, its domain is only defined; a repair compares."""
    if job.repair is not None and job.state is State.COPYING_FULL:
        return "Comparing"
    return "Defining" if job.state is State.STARTING and not job.plan.target.start else str(job.state)


class Display(Protocol):
    """How a job is shown while it is watched."""

    def moved(self, job: Migration) -> None: ...
    def stands(self, state: str, name: str, progress: Progress) -> None: ...
    def progressed(self, progress: Progress) -> None: ...
    def disks(self, rows: Sequence[DiskProgress]) -> None: ...
    def line(self, text: str) -> None: ...


def watch(
    client: "Client", job: Migration, *, show: Display, each: Callable[["StreamEvent"], None] = lambda _: None
) -> Migration:
    """Follows `job` to its end; `each` gets every event as it came. KeyboardInterrupt leaves the job as it is.

    The stream of one job begins with that job, also after it has ended.
    """
    show.moved(job)
    for event in client.follow(job_id=job.id, on_lost=lambda: show.line("the service does not answer; waiting for it")):
        each(event)
        if event.event == "migration":
            job = Migration.model_validate_json(event.data)
            show.moved(job)
            if job.ended:
                return job
        elif event.event == "progress":
            update = ProgressUpdate.model_validate_json(event.data)
            show.progressed(update.progress)
            if update.disks:
                show.disks(update.disks)
    raise Internal("the stream ended without the job")


def display(*, quiet: bool) -> AbstractContextManager[Display]:
    """Bars on a terminal, lines elsewhere, nothing where `quiet`."""
    if quiet:
        return nullcontext(_Quiet())
    if sys.stdout.isatty():
        return Bars()
    return nullcontext(Lines())


def verdict(job: Migration) -> bool:
    """Prints the error of a failed job; True, if the job is Completed."""
    if job.state == State.COMPLETED:
        return True
    error = job.last_error
    code, message, hint = (error.code, error.message, error.hint) if error else ("E_MIG_CANCELLED", str(job.state), None)
    print_error(code, as_options(message), hint and as_options(hint))
    return False


class _Quiet:
    def moved(self, job: Migration) -> None:
        pass

    def stands(self, state: str, name: str, progress: Progress) -> None:
        pass

    def progressed(self, progress: Progress) -> None:
        pass

    def disks(self, rows: Sequence[DiskProgress]) -> None:
        pass

    def line(self, text: str) -> None:
        pass


class Lines:
    """A line at each change of state, each new error, each tenth, and after ten seconds without one."""

    def __init__(self, *, out: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or (lambda text: print(text, flush=True))
        self._clock = clock
        self._state: str | None = None
        self._error: Problem | None = None
        self._attempts = 0
        self._held: str | None = None
        self._shown_at, self._shown_part = clock(), 0

    def moved(self, job: Migration) -> None:
        self.stands(stage(job), job.name, job.progress)
        held = held_until(job) if job.held and (job.state == State.DELTA_SYNCING or job.asked_to_cut_over) else None
        if held not in (None, self._held):
            self.line(f"held {held}")
        self._held = held
        if job.last_error is not None and job.last_error != self._error and not job.last_error.fatal:
            self._error = job.last_error
            self.line(f"{self._error.code}: {as_options(self._error.message)}")
            if self._error.hint:
                self.line(f"hint: {as_options(self._error.hint)}")
        for attempt in job.boot_attempts[self._attempts :]:
            if attempt.trouble is not None:
                self._attempts += 1
                self.line(f"did not boot from {attempt.disk_bus}: {attempt.trouble}")

    def stands(self, state: str, name: str, progress: Progress) -> None:
        if state != self._state:
            self._state, self._shown_part = state, 0
            self.line(f"{state}  {name}")

    def progressed(self, progress: Progress) -> None:
        part = LINES_A_COPY * progress.bytes_done // progress.bytes_total if progress.bytes_total else 0
        if part > self._shown_part or self._clock() >= self._shown_at + LINE_EVERY_S:
            self._shown_part = part
            self.line(f"{self._state}  {described(progress, state=self._state)}")

    def disks(self, rows: Sequence[DiskProgress]) -> None:
        """Nothing, as a log should not be longer for every disk: `synvirt migrations show` lists them."""

    def line(self, text: str) -> None:
        self._shown_at = self._clock()
        self._out(f"{time.strftime('%H:%M:%S')} {shown(text)}")


class Bars(AbstractContextManager["Bars"]):
    """One growing bar, and one for each disk if there are several, under a line for each past state."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        # The service knows the rate and the remaining time; rich would only estimate them.
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[figures]}", markup=False)
        )
        self._task = self._bar.add_task("", total=None, figures="")
        self._rows: dict[str, TaskID] = {}
        self._state = ""
        self._lines = Lines(out=lambda text: self._bar.console.print(text, markup=False, highlight=False))

    def __enter__(self) -> "Bars":
        self._bar.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._bar.stop()

    def moved(self, job: Migration) -> None:
        self._lines.moved(job)
        self.stands(stage(job), job.name, job.progress)
        self.disks(job.disks)

    def disks(self, rows: Sequence[DiskProgress]) -> None:
        """Until all are copied, as later work belongs to no disk."""
        copied = all(row.state in ("copied", "skipped") for row in rows)
        if len(rows) < 2 or copied:
            for task in self._rows.values():
                self._bar.remove_task(task)
            self._rows.clear()
            return
        for row in rows:
            if row.key not in self._rows:
                self._rows[row.key] = self._bar.add_task(f"  {shown(row.label)}", total=None, figures="")
            figures = f"{sized(row.bytes_done)} of {sized(row.bytes_total)}" if row.state == "copying" else row.state
            self._bar.update(self._rows[row.key], completed=row.bytes_done, total=row.bytes_total or None, figures=figures)

    def stands(self, state: str, name: str, progress: Progress) -> None:
        self._lines.stands(state, name, progress)
        self._state = state
        self._bar.update(self._task, description=state)
        self.progressed(progress)

    def progressed(self, progress: Progress) -> None:
        figures = described(progress, state=self._state) if progress.bytes_total else ""
        self._bar.update(self._task, completed=progress.bytes_done, total=progress.bytes_total or None, figures=figures)

    def line(self, text: str) -> None:
        self._lines.line(text)


def outcome(attempt: BootAttempt) -> str:
    """The result of an attempt to boot, in words."""
    if attempt.sign is not None:
        return f"booted, seen by: {attempt.sign}"
    return attempt.trouble or "is being tried"


_HELD: dict[HeldFor, str] = {
    "window": "for its window: synvirt windows show {window}",
    "request": "until it is asked to cut over: synvirt migrations cutover {job}",
    "pass": "until its present pass has ended; it was asked to cut over",
    "budget": "until its outage is short enough; it was asked to cut over",
    "slot": "until it has a slot for its next pass; it was asked to cut over",
}


def held_until(job: Migration) -> str:
    """What a held job waits for."""
    return _HELD[job.held_for].format(window=job.plan.warm.window_id, job=job.id)


def described(progress: Progress, *, state: str | None = None, ended: bool = False) -> str:
    """Between two deltas, and at the end, nothing is copied: then there is no rate and no remaining time."""
    done, total = progress.bytes_done, progress.bytes_total
    parts = [f"{percent(done, total)} %" if total else "…", f"{sized(done)} of {sized(total)}"]
    if ended or (done >= total > 0 and (state == State.DELTA_SYNCING or not progress.rate_bps)):
        return ", ".join(parts)
    parts.append(f"{sized(progress.rate_bps)}/s")
    if progress.eta_s is not None and progress.bytes_done < progress.bytes_total:
        parts.append(f"{duration(round(progress.eta_s))} to go")
    return ", ".join(parts)
