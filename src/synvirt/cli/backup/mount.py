"""synvirt backup mount: a restore point's disks by NBD, until Ctrl-C. No service is needed, only its data_dir."""

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from synvirt.cli.interrupts import ENDING
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import FAILED, print_error, shown
from synvirt.errors import BackupBadRequest, BackupNotFound
from synvirt.sizes import sized


@with_options
def mount(
    options: Options,
    point: Annotated[str, typer.Argument(metavar="POINT", help="Its id, or the beginning of it")],
    disk: Annotated[list[str] | None, typer.Option(help="Only this disk (vda); may be given again")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="On 127.0.0.1 too, where all users of this host can read it; 0: any")
    ] = None,
) -> None:
    """Serve the disks of a restore point read-only by NBD, until Ctrl-C. Nothing is restored for it.

    Example: synvirt backup mount POINT --disk vda; then nbdfuse FOLDER URI, or qemu-img info URI
    """
    from synvirt.backups.restores.mounting import mounted

    if options.address is not None:
        raise BackupBadRequest(
            "mount reads the repository itself: it works only on the service's own host",
            hint="leave --server and SYNVIRT_SERVER out",
        )
    output = sys.stdout
    # The log goes to stderr, as stdout is for the caller.
    with contextlib.redirect_stdout(sys.stderr), _repository(options, point) as (repository, manifest):
        # Before any thread is begun, so that each of them leaves these signals to the one that waits for them.
        ending = {number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
        try:
            with mounted(repository, manifest, tuple(disk or ()), port=port) as disks:
                _say(options, disks, output)
                signal.sigwait(ending)
                failures = [one.failure for one in disks if one.failure is not None]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for failure in failures:
        print_error(failure.code, failure.detail, failure.hint)
    if failures:
        raise typer.Exit(FAILED)


@contextlib.contextmanager
def _repository(options: Options, point: str) -> Iterator[Any]:
    """The open repository of that restore point, and the manifest whose author was checked."""
    from synvirt.backups.authors import UNKNOWN, Authors, doubt
    from synvirt.backups.points import Points
    from synvirt.backups.repositories import Repositories
    from synvirt.proof.signing import HostKey
    from synvirt.store import Store

    settings = options.settings
    _check_there(settings.data_dir)
    store = Store(settings.store_url)
    try:
        known = _chosen(Points(store.backups, host=settings.host_id).all(), point)
        caches = settings.data_dir / "backups"
        repositories = Repositories(
            store.backups,
            host=settings.host_id,
            keyring=settings.keyring_dir,
            caches=caches,
            allowed_hosts=settings.source_allowed_hosts,
            authors=Authors(HostKey(settings.keyring_dir / "receipts.key", settings.host_id), settings.backup_signers),
        )
        repository = repositories.opened(known.repository_id)
        unread = repository.unread(known.id)
        reason = doubt(repositories.authors.of(unread))
        if reason is not None:
            print_error(UNKNOWN, reason, None)
        yield repository, repository.parsed(unread)
    finally:
        store.close()


def _chosen(points: Any, beginning: str) -> Any:
    """The point whose id begins with the text."""
    found = [point for point in points if str(point.id).startswith(beginning)]
    if not found:
        raise BackupNotFound(f"there is no restore point {beginning}", hint="synvirt backup points")
    if len(found) > 1:
        raise BackupBadRequest(f"the ids of {len(found)} restore points begin with {beginning}")
    return found[0]


def _check_there(data_dir: Path) -> None:
    """Checks that the store exists, as it would be made otherwise."""
    if not (data_dir / "keyring").is_dir():
        raise BackupBadRequest(
            f"there is no service's data in {data_dir}", hint="name its folder: --data-dir; and be the service's user, or root"
        )


def _say(options: Options, disks: Any, output: TextIO) -> None:
    if options.json:
        found = [{"target": one.target, "size_bytes": one.size_bytes, "uris": list(one.uris)} for one in disks]
        print(json.dumps({"disks": found}), file=output, flush=True)
        return
    for one in disks:
        print(f"{shown(one.target)}  {sized(one.size_bytes)}  {'  '.join(one.uris)}", file=output)
    # «mount» sounds like a folder of files. A shell may take the ? of a URI for a pattern.
    print("These are NBD exports, read-only, until Ctrl-C; no folder is mounted", file=output)
    print(f"A disk as a file: nbdfuse FOLDER {shlex.quote(disks[0].uris[0])}", file=output, flush=True)
