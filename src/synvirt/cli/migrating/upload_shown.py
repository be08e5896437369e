"""An upload with its progress. It is sent completely, and nothing stays of one that is interrupted before its end."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from synvirt.cli.program import INTERRUPTED, shown
from synvirt.errors import SynvirtError

if TYPE_CHECKING:
    from synvirt.cli.client import Client

Sent = Callable[[int, int], None]

# For people who read a log: a line at each tenth, or after this long without a line.
LINES_A_FILE = 10
LINE_EVERY_S = 10.0


def send(client: "Client", file: Path, *, sha256: str | None = None, quiet: bool = False) -> str:
    """Sends the file; returns the service's answer, an Upload. Ctrl-C ends the command: the service keeps nothing of half a
    file. A whole one it may keep: it answers only once the file is on its disk, which may take minutes."""
    stays = "nothing of the upload is left"

    def noted(sent: int, total: int) -> None:
        nonlocal stays
        if sent >= total:
            stays = "the file was sent, and the service may keep it: synvirt uploads list"
        on_sent(sent, total)

    try:
        with _progress(file.name, quiet=quiet) as on_sent:
            return client.upload(file, sha256=sha256, on_sent=noted)
    except KeyboardInterrupt:
        print(f"Interrupted: {stays}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def file_stays(upload_id: object) -> str:
    """The text about a file that was sent without a job."""
    return f"the file stays at the service until it expires: synvirt uploads show {upload_id}"


@contextmanager
def kept(upload_id: object) -> Iterator[None]:
    """What was sent stays when the plan is refused, or only tried: it can be imported by its path there."""
    try:
        yield
    except (SynvirtError, typer.Exit):
        if upload_id is not None:
            print(file_stays(upload_id).capitalize(), file=sys.stderr)
        raise


@contextmanager
def _progress(name: str, *, quiet: bool) -> Iterator[Sent]:
    """A bar on a terminal, lines elsewhere."""
    if quiet:
        yield lambda _sent, _total: None
    elif sys.stdout.isatty():
        with _bar(name) as on_sent:
            yield on_sent
    else:
        yield Lines(name).sent


@contextmanager
def _bar(name: str) -> Iterator[Sent]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(shown(name), total=None)
        yield lambda sent, total: bar.update(task, completed=sent, total=total)


class Lines:
    """The progress of an upload as lines, for output that is no terminal."""

    def __init__(
        self, name: str, *, out: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._clock = name, clock
        self._out = out or (lambda text: print(text, flush=True))
        self._began_at = self._shown_at = clock()
        self._shown_part = 0

    def sent(self, sent: int, total: int) -> None:
        """Prints a line now and then, by bytes and by time."""
        from synvirt.cli.migrating.watching import described
        from synvirt.model.job import Progress

        part, moment = LINES_A_FILE * sent // total, self._clock()
        if part == self._shown_part and moment < self._shown_at + LINE_EVERY_S:
            return
        self._shown_part, self._shown_at = part, moment
        rate = sent / max(moment - self._began_at, 0.001)
        progress = Progress(bytes_total=total, bytes_done=sent, rate_bps=rate, eta_s=(total - sent) / rate)
        self._out(f"{time.strftime('%H:%M:%S')} {shown(self._name)}  {described(progress)}")
