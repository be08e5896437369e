"""synvirt disk: only the data path, without a service or a job.

Each command's modules are imported when it runs, and argparse only for what `plain` does not read: `synvirt disk convert` of a
small disk takes little longer than the start of Python; Typer alone would take three times that.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from synvirt.cli.disk.plain import plain
from synvirt.cli.interrupts import exit_code, is_hung_up, raised
from synvirt.cli.program import FAILED, INTERRUPTED, WRONG_USAGE, failed, print_error_as_json, shown
from synvirt.errors import BadRequest

# What a command line says, as attributes: those that `parsing` names.
Options = Any


def main(arguments: Sequence[str], *, json: bool = False) -> int:
    """Runs one command; returns the exit code. `arguments`: those after `synvirt disk`. `json`: --json came before."""
    options: Options = plain(arguments)
    if options is None:
        from synvirt.cli.disk.parsing import WrongUsage, parsed

        try:
            options = parsed(arguments)
        except SystemExit as end:  # --help
            return end.code if isinstance(end.code, int) else WRONG_USAGE
        except WrongUsage as wrong:
            if json or "--json" in arguments:
                print_error_as_json(BadRequest(wrong.detail))
            print(f"{wrong.usage}{shown(wrong.detail)}", file=sys.stderr)
            return WRONG_USAGE
    options.json = options.json or json
    try:
        with raised():
            code: int = _RUNS[options.command](options)
    except KeyboardInterrupt:
        return exit_code() or INTERRUPTED
    except BrokenPipeError:
        return FAILED
    except Exception as error:
        return (is_hung_up() and exit_code()) or failed(_hinted(error, options), as_json=options.json)
    return code


def _hinted(error: Exception, options: Options) -> Exception:
    """The same error. Where the image names a file outside its own folder, the hint names the option that allows it."""
    from synvirt.disks.beneath import LEADS_OUT
    from synvirt.errors import SynvirtError

    if isinstance(error, SynvirtError) and error.hint == LEADS_OUT:
        error.hint = "only files in the image's own folder are opened; " if options.root is None else ""
        error.hint += "--root FOLDER names a folder above both"
    return error


def _info(options: Options) -> int:
    from synvirt.cli.disk.images import disks_in
    from synvirt.cli.disk.info import described, lines_of

    disks = [described(found) for found in disks_in(options.image, options.key_file, root=options.root)]
    if options.json:
        _print_json({"path": str(options.image), "disks": disks})
    else:
        for disk in disks:
            print("\n".join(lines_of(disk)), end="\n\n")
    return 0


def _convert(options: Options) -> int:
    from synvirt.cli.disk.convert import Wanted, convert, is_quiet, sentence
    from synvirt.cli.disk.images import chosen, disks_in

    found = chosen(disks_in(options.image, options.key_file, root=options.root), options.disk, options.image)
    wanted = Wanted(force=options.force, threads=options.threads, verify=options.verify, ledger=options.ledger)
    report = convert(options.image, found, options.target, wanted, quiet=is_quiet(options.json))
    if options.json:
        _print_json(report)
    else:
        print(sentence(report))
    return 0


def _verify(options: Options) -> int:
    from synvirt.cli.disk.images import chosen, disks_in
    from synvirt.cli.disk.verify import ledger_of, verified

    ledger = ledger_of(options.ledger, options.receipt, options.volume, options.key)
    image: Path | None = options.repair
    source = None if image is None else chosen(disks_in(image, options.key_file, root=options.root), options.disk, image)
    report = verified(options.target, ledger, source, threads=options.threads)
    if options.json:
        _print_json(report.as_json())
    else:
        print("\n".join(report.lines()))
    return report.exit_code


def _map(options: Options) -> int:
    from synvirt.cli.disk.compare import print_map
    from synvirt.cli.disk.images import chosen, disks_in

    print_map(
        chosen(disks_in(options.image, options.key_file, root=options.root), options.disk, options.image), as_json=options.json
    )
    return 0


def _compare(options: Options) -> int:
    from synvirt.cli.disk.compare import CANNOT_OPEN, CANNOT_READ, compared, opened
    from synvirt.cli.disk.images import chosen, disks_in
    from synvirt.errors import SynvirtError

    failure = CANNOT_OPEN
    try:
        first = chosen(
            disks_in(options.first, options.key_file, root=options.root, key_needed=False), options.disk, options.first
        )
        wanted = options.second_disk or options.disk
        second = chosen(disks_in(options.second, options.key_file, root=options.root, key_needed=False), wanted, options.second)
        with opened(first) as one, opened(second) as other:
            failure = CANNOT_READ
            report = compared(one, other, strict=options.strict, threads=options.threads)
    except SynvirtError as error:
        failed(_hinted(error, options), as_json=options.json)
        return failure
    if options.json:
        _print_json({"first": str(options.first), "second": str(options.second), **report.as_json()})
    else:
        print("\n".join(report.lines()))
    return report.exit_code


def _print_json(value: dict[str, Any]) -> None:
    import json

    print(json.dumps(value))


_RUNS: dict[str, Callable[[Options], int]] = {
    "info": _info,
    "convert": _convert,
    "verify": _verify,
    "map": _map,
    "compare": _compare,
}
