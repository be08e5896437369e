"""synvirt uploads add|list|show|remove|inspect"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from synvirt.cli.importing import print_inspection
from synvirt.cli.listing import at, full_id, print_table
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import INTERRUPTED, shown

app = typer.Typer(no_args_is_help=True, help="Archives sent to the service, to be imported from there.")

UploadId = Annotated[str, typer.Argument(metavar="ID", help="The upload's id; its beginning is enough when no other begins so")]
Sent = Callable[[int, int], None]

# A log is read by people: a line at each tenth, or when nothing was said for this long.
LINES_A_FILE = 10
LINE_EVERY_S = 10.0


@app.command()
@with_options
def add(
    options: Options,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive or a disk image, here")],
    *,
    sha256: Annotated[str | None, typer.Option(metavar="HEX", help="What the file's SHA-256 must be")] = None,
) -> None:
    """Send a file to the service. Its SHA-256 is taken on the way, and checked by the service."""
    import json

    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise typer.BadParameter("is not 64 hexadecimal digits", param_hint="--sha256")
    with options.connect() as client:
        try:
            with _progress(file.name, quiet=options.json) as told:
                answer = client.upload(file, sha256=sha256, on_sent=told)
        except KeyboardInterrupt:
            print("Interrupted: nothing of the upload is left", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
    if options.json:
        print(answer)
        return
    upload = json.loads(answer)
    print(f"Upload {upload['id']} has SHA-256 {upload['sha256']}. Import it: synvirt import '{shown(upload['path'])}'")


@app.command("list")
@with_options
def list_(
    options: Options,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many")] = 1000,
    cursor: Annotated[str | None, typer.Option(help="The page behind this `next_cursor`")] = None,
) -> None:
    """List the uploads, newest first."""
    import json

    from synvirt.cli.watching import sized

    with options.connect() as client:
        asked: dict[str, Any] = {"limit": limit} | ({"cursor": cursor} if cursor else {})
        answer = client.ask("GET", "/uploads", params=asked)
    if options.json:
        print(answer)
        return
    page = json.loads(answer)
    if not page["items"]:
        print("There are no uploads")
        return
    rows = [(one["id"], shown(one["filename"]), sized(one["size_bytes"]), at(one["expires_at"])) for one in page["items"]]
    print_table(("ID", "NAME", "SIZE", "EXPIRES"), rows)
    if page["next_cursor"]:
        print(f"There are more: --cursor {page['next_cursor']}")


@app.command()
@with_options
def show(options: Options, upload: UploadId) -> None:
    """Show one upload: its size, its digest, where it lies, until when."""
    import json

    with options.connect() as client:
        answer = client.ask("GET", f"/uploads/{full_id(client, 'upload', upload)}")
    if options.json:
        print(answer)
        return
    for name, value in json.loads(answer).items():
        print(f"{name:11} {shown(str(value))}")


@app.command()
@with_options
def remove(options: Options, upload: UploadId) -> None:
    """Remove an upload. Refused while a job reads it."""
    with options.connect() as client:
        id_ = full_id(client, "upload", upload)
        client.ask("DELETE", f"/uploads/{id_}")
    if not options.json:
        print(f"Upload {id_} is removed")


@app.command()
@with_options
def inspect(options: Options, upload: UploadId) -> None:
    """Say what an upload is and which VM is in it."""
    with options.connect() as client:
        answer = client.ask("POST", f"/uploads/{full_id(client, 'upload', upload)}/inspect")
    print_inspection(answer, as_json=options.json)


@contextmanager
def _progress(name: str, *, quiet: bool) -> Iterator[Sent]:
    """A bar on a terminal, lines elsewhere."""
    if quiet:
        yield lambda _sent, _total: None
    elif sys.stdout.isatty():
        with _bar(name) as told:
            yield told
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
    def __init__(
        self, name: str, *, out: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._clock = name, clock
        self._out = out or (lambda text: print(text, flush=True))
        self._began_at = self._told_at = clock()
        self._told_part = 0

    def sent(self, sent: int, total: int) -> None:
        from synvirt.cli.watching import described
        from synvirt.model import Progress

        part, moment = LINES_A_FILE * sent // total, self._clock()
        if part == self._told_part and moment < self._told_at + LINE_EVERY_S:
            return
        self._told_part, self._told_at = part, moment
        rate = sent / max(moment - self._began_at, 0.001)
        told = Progress(bytes_total=total, bytes_done=sent, rate_bps=rate, eta_s=(total - sent) / rate)
        self._out(f"{time.strftime('%H:%M:%S')} {shown(self._name)}  {described(told)}")
