"""synvirt disk: the data path by itself, with no service and no job. What a command needs is imported when it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from synvirt.cli.options import Options
from synvirt.cli.program import tell

app = typer.Typer(no_args_is_help=True, help="Look at disk images, compare them, convert them to raw. No service is needed.")

Image = Annotated[
    Path, typer.Argument(exists=True, metavar="IMAGE", help="A disk image, an OVA, or the folder or description of a VM")
]
Disk = Annotated[str | None, typer.Option("--disk", help="Which disk, where there are several: `disk info` lists their names")]
KeyFile = Annotated[
    Path | None, typer.Option("--key-file", exists=True, dir_okay=False, help="Holds the passphrase of an encrypted image")
]
Threads = Annotated[int | None, typer.Option(min=1, max=64, help="How many work at once; by default one a core")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]


@app.command()
def info(context: typer.Context, image: Image, *, key_file: KeyFile = None, json: AsJson = False) -> None:
    """What an image is: its format, sizes, chain, and how much of it is data."""
    from synvirt.cli.disk_images import disks_in
    from synvirt.cli.disk_info import described, lines_of

    disks = [described(found) for found in disks_in(image, key_file)]
    if _wants_json(context, json):
        _print_json({"path": str(image), "disks": disks})
        return
    for disk in disks:
        print("\n".join(lines_of(disk)), end="\n\n")


@app.command()
def convert(
    context: typer.Context,
    image: Image,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The raw file to make, or a block device to write")],
    *,
    disk: Disk = None,
    key_file: KeyFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file, or write over the device")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the target again, against SHA-256 hashes made while copying")
    ] = False,
    ledger: Annotated[
        Path | None, typer.Option("--ledger", metavar="FILE", help="Write these hashes to a file (JSON lines)")
    ] = None,
    threads: Threads = None,
    json: AsJson = False,
) -> None:
    """Copy a disk into a sparse raw file, which has its name only when it is complete. Digests of an OVA are checked."""
    from synvirt.cli.disk_convert import Wanted, is_quiet, said
    from synvirt.cli.disk_convert import convert as convert_disk
    from synvirt.cli.disk_images import chosen, disks_in

    as_json = _wants_json(context, json)
    found = chosen(disks_in(image, key_file), disk, image)
    wanted = Wanted(force=force, threads=threads, verify=verify, ledger=ledger)
    report = convert_disk(image, found, target, wanted, quiet=is_quiet(as_json))
    if as_json:
        _print_json(report)
    else:
        print(said(report))


@app.command(name="map")
def map_(context: typer.Context, image: Image, *, disk: Disk = None, key_file: KeyFile = None, json: AsJson = False) -> None:
    """Where a disk holds data, and where it reads as zeros."""
    from synvirt.cli.disk_compare import print_map
    from synvirt.cli.disk_images import chosen, disks_in

    print_map(chosen(disks_in(image, key_file), disk, image), as_json=_wants_json(context, json))


@app.command()
def compare(
    context: typer.Context,
    first: Image,
    second: Image,
    *,
    disk: Disk = None,
    second_disk: Annotated[
        str | None, typer.Option("--second-disk", help="The same of the second one; by default --disk")
    ] = None,
    key_file: KeyFile = None,
    strict: Annotated[bool, typer.Option("--strict", help="Sizes must be the same, too")] = False,
    threads: Threads = None,
    json: AsJson = False,
) -> None:
    """Have two disks the same content, whatever their formats? Ends with 0: yes, 1: no, 2 and more: it cannot be told.

    What the larger of two disks has more may be zeros, unless --strict. --key-file is of whichever is encrypted.
    """
    from synvirt.cli.disk_compare import CANNOT_OPEN, CANNOT_READ, compared, opened
    from synvirt.cli.disk_images import chosen, disks_in
    from synvirt.errors import SynvirtError

    failure = CANNOT_OPEN
    try:
        one = chosen(disks_in(first, key_file, key_needed=False), disk, first)
        other = chosen(disks_in(second, key_file, key_needed=False), second_disk or disk, second)
        with opened(one) as one_reader, opened(other) as other_reader:
            failure = CANNOT_READ
            report = compared(one_reader, other_reader, strict=strict, threads=threads)
    except SynvirtError as error:
        tell(error.code, error.detail, error.hint)
        raise typer.Exit(failure) from error
    if _wants_json(context, json):
        _print_json({"first": str(first), "second": str(second), **report.as_json()})
    else:
        print("\n".join(report.lines()))
    raise typer.Exit(report.exit_code)


def _wants_json(context: typer.Context, json: bool) -> bool:
    before = context.find_root().obj
    return json or (isinstance(before, Options) and before.json)


def _print_json(value: dict[str, Any]) -> None:
    import json

    print(json.dumps(value))
