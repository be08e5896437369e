"""synvirt uploads add|list|show|remove|inspect"""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from synvirt.cli.listing import Cursor, Limit, at, full_id, print_list, print_one, print_table
from synvirt.cli.migrating.importing import print_inspection
from synvirt.cli.migrating.upload_shown import send
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import print_sheet, shown

app = typer.Typer(no_args_is_help=True, help="Archives sent to the service, to be imported from there.")

UploadId = Annotated[
    str, typer.Argument(metavar="ID", help="The upload's id; its beginning is enough if no other id begins with it")
]


@app.command()
@with_options
def add(
    options: Options,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive or a disk image on this computer")],
    *,
    sha256: Annotated[str | None, typer.Option(metavar="HEX", help="What the file's SHA-256 must be")] = None,
) -> None:
    """Send a file to the service. Its SHA-256 is taken on the way, and checked by the service.

    Example: synvirt uploads add web.ova
    """
    import json

    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise typer.BadParameter("is not 64 hexadecimal digits", param_hint="--sha256")
    with options.connect() as client:
        answer = send(client, file, sha256=sha256, quiet=options.json)
    if options.json:
        print(answer)
        return
    upload = json.loads(answer)
    print(f"Upload {upload['id']} has SHA-256 {upload['sha256']}. Import it: synvirt import '{shown(upload['path'])}'")


@app.command("list")
@with_options
def list_(
    options: Options,
    limit: Limit = 1000,
    cursor: Cursor = None,
) -> None:
    """List the uploads, newest first.

    Example: synvirt uploads list
    """
    print_list(options, "/uploads", limit, cursor, none="There are no uploads", show=_table)


@app.command()
@with_options
def show(options: Options, upload: UploadId) -> None:
    """Show one upload: its size, its digest, its path, and until when it is kept.

    Example: synvirt uploads show 77c0
    """
    print_one(
        options,
        lambda client: f"/uploads/{full_id(client, 'upload', upload)}",
        lambda found: print_sheet((name, str(value)) for name, value in found.items()),
    )


@app.command("rm", hidden=True)
@app.command()
@with_options
def remove(options: Options, upload: UploadId) -> None:
    """Remove an upload. Refused while a job reads it.

    Example: synvirt uploads remove 77c0
    """
    with options.connect() as client:
        id_ = full_id(client, "upload", upload)
        client.ask("DELETE", f"/uploads/{id_}")
    if not options.json:
        print(f"Upload {id_} is removed")


@app.command()
@with_options
def inspect(
    options: Options,
    upload: UploadId,
    vm: Annotated[str | None, typer.Option(help="Which of several VMs in it: its name or id")] = None,
) -> None:
    """Say what an upload is and which VM is in it.

    Example: synvirt uploads inspect 77c0
    """
    with options.connect() as client:
        path = f"/uploads/{full_id(client, 'upload', upload)}/inspect"
        answer = client.ask("POST", path, json={} if vm is None else {"vm": vm})
    print_inspection(answer, as_json=options.json)


def _table(items: list[dict[str, Any]]) -> None:
    from synvirt.sizes import sized

    rows = [(one["id"], shown(one["filename"]), sized(one["size_bytes"]), at(one["expires_at"])) for one in items]
    print_table(("ID", "NAME", "SIZE", "EXPIRES"), rows)
