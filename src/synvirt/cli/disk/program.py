"""synvirt disk: only the data path, without a service or a job.

argparse parses it, and each command's modules are imported when it runs: `synvirt disk convert` of a small disk takes little
longer than the start of Python; Typer alone would take three times that.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from synvirt.cli.interrupts import exit_code, is_hung_up, raised
from synvirt.cli.program import FAILED, INTERRUPTED, WRONG_USAGE, failed, print_error_as_json
from synvirt.errors import BadRequest

_IMAGE = "a disk image, an OVA, or the folder or description of a VM"


def main(arguments: Sequence[str], *, json: bool = False) -> int:
    """Runs one command; returns the exit code. `arguments`: those after `synvirt disk`. `json`: --json came before."""
    try:
        options, unknown = _parser(arguments).parse_known_args(list(arguments) or ["--help"])
        if unknown:
            options.parser.error(_unknown(unknown[0], options.parser))
    except SystemExit as end:  # --help
        return end.code if isinstance(end.code, int) else WRONG_USAGE
    except _WrongUsage as wrong:
        if json or "--json" in arguments:
            print_error_as_json(BadRequest(wrong.detail))
        print(f"{wrong.usage}{wrong.detail}", file=sys.stderr)
        return WRONG_USAGE
    options.json = options.json or json
    try:
        with raised():
            code: int = options.run(options)
    except KeyboardInterrupt:
        return exit_code() or INTERRUPTED
    except BrokenPipeError:
        return FAILED
    except Exception as error:
        return (is_hung_up(error) and exit_code()) or failed(error, as_json=options.json)
    return code


def _info(options: argparse.Namespace) -> int:
    from synvirt.cli.disk.images import disks_in
    from synvirt.cli.disk.info import described, lines_of

    disks = [described(found) for found in disks_in(options.image, options.key_file)]
    if options.json:
        _print_json({"path": str(options.image), "disks": disks})
    else:
        for disk in disks:
            print("\n".join(lines_of(disk)), end="\n\n")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from synvirt.cli.disk.convert import Wanted, convert, is_quiet, sentence
    from synvirt.cli.disk.images import chosen, disks_in

    found = chosen(disks_in(options.image, options.key_file), options.disk, options.image)
    wanted = Wanted(force=options.force, threads=options.threads, verify=options.verify, ledger=options.ledger)
    report = convert(options.image, found, options.target, wanted, quiet=is_quiet(options.json))
    if options.json:
        _print_json(report)
    else:
        print(sentence(report))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from synvirt.cli.disk.images import chosen, disks_in
    from synvirt.cli.disk.verify import ledger_of, verified

    ledger = ledger_of(options.ledger, options.receipt, options.volume, options.key)
    image: Path | None = options.repair
    source = None if image is None else chosen(disks_in(image, options.key_file), options.disk, image)
    report = verified(options.target, ledger, source, threads=options.threads)
    if options.json:
        _print_json(report.as_json())
    else:
        print("\n".join(report.lines()))
    return report.exit_code


def _map(options: argparse.Namespace) -> int:
    from synvirt.cli.disk.compare import print_map
    from synvirt.cli.disk.images import chosen, disks_in

    print_map(chosen(disks_in(options.image, options.key_file), options.disk, options.image), as_json=options.json)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from synvirt.cli.disk.compare import CANNOT_OPEN, CANNOT_READ, compared, opened
    from synvirt.cli.disk.images import chosen, disks_in
    from synvirt.errors import SynvirtError

    failure = CANNOT_OPEN
    try:
        first = chosen(disks_in(options.first, options.key_file, key_needed=False), options.disk, options.first)
        wanted = options.second_disk or options.disk
        second = chosen(disks_in(options.second, options.key_file, key_needed=False), wanted, options.second)
        with opened(first) as one, opened(second) as other:
            failure = CANNOT_READ
            report = compared(one, other, strict=options.strict, threads=options.threads)
    except SynvirtError as error:
        failed(error, as_json=options.json)
        return failure
    if options.json:
        _print_json({"first": str(options.first), "second": str(options.second), **report.as_json()})
    else:
        print("\n".join(report.lines()))
    return report.exit_code


class _WrongUsage(Exception):
    def __init__(self, usage: str, detail: str) -> None:
        self.usage, self.detail = usage, detail


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _WrongUsage(self.format_usage(), f"{self.prog}: {message}")


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"{word} is one word too many"
    from synvirt.nearest import did_you_mean

    known = parser.format_usage().replace("[", " ").replace("]", " ").split()
    near = did_you_mean(word.partition("=")[0], (one for one in known if one.startswith("--")))
    return f"there is no option {word}" + (f"; {near}" if near else "")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that `arguments` begin with; of all commands, where they begin otherwise. (argparse takes a
    third of a millisecond for each option.)"""
    parser = _Parser(
        prog="synvirt disk",
        description="Look at disk images, compare them, convert them to raw. No service is needed.",
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    # Without `prog`, argparse would format the usage to find it.
    commands = parser.add_subparsers(prog=parser.prog, metavar="COMMAND", required=True)
    named = next((word for word in arguments if word != "--json"), "")
    for name, add in _COMMANDS.items():
        if name == named or named not in _COMMANDS:
            add(commands)
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    """argparse makes one for each option, and would load shutil and its compressors, to know how wide the terminal is."""
    return argparse.HelpFormatter(prog, width=_columns() - 2)


@cache
def _columns() -> int:
    """Of the terminal, as `shutil.get_terminal_size` finds them."""
    try:
        told = int(os.environ.get("COLUMNS", "0"))
    except ValueError:
        told = 0
    if told > 0:
        return told
    try:
        return os.get_terminal_size(sys.__stdout__.fileno() if sys.__stdout__ else -1).columns or 80
    except (OSError, ValueError):
        return 80


def _add_info(commands: Any) -> None:
    info = _command(commands, "info", _info, "What an image is: its format, sizes, chain, and how much of it is data.")
    info.add_argument("image", metavar="IMAGE", type=_existing, help=_IMAGE)


def _add_convert(commands: Any) -> None:
    convert = _command(
        commands,
        "convert",
        _convert,
        "Copy a disk into a sparse raw file, which has its name only when it is complete. Digests of an OVA are checked.",
    )
    convert.add_argument("image", metavar="IMAGE", type=_existing, help=_IMAGE)
    convert.add_argument("target", metavar="TARGET", type=Path, help="the raw file to make, or a block device to write")
    _add_disk(convert)
    convert.add_argument("--force", action="store_true", help="replace the file, or write over the device")
    convert.add_argument(
        "--verify",
        action="store_true",
        help="read the target again, against XXH3-128 hashes made while copying (with --ledger: SHA-256)",
    )
    convert.add_argument("--ledger", metavar="FILE", type=Path, help="write SHA-256 hashes of the copy to a file (JSON lines)")
    _add_threads(convert)


def _add_verify(commands: Any) -> None:
    verify = _command(
        commands,
        "verify",
        _verify,
        "Compare a volume with the hashes of what was copied to it, and list the extents that differ."
        " --repair overwrites these from the source, and writes nothing else. It reverts what a guest has written since:"
        " do not use it for a volume whose guest was started.",
    )
    verify.add_argument("target", metavar="VOLUME", type=_existing, help="a raw file or a block device")
    verify.add_argument("--ledger", metavar="FILE", type=_existing, help="as `disk convert --ledger` wrote it")
    verify.add_argument("--receipt", metavar="FOLDER", type=_existing, help="a job's receipt, in place of --ledger")
    verify.add_argument("--volume", metavar="DISK", help="which disk of the receipt, where there are several")
    verify.add_argument("--key", metavar="FILE", type=_existing, help="the host's key, as `synvirt receipt key` printed it")
    verify.add_argument("--repair", metavar="IMAGE", type=_existing, help=f"the source to repair from: {_IMAGE}")
    _add_disk(verify)
    _add_threads(verify)


def _add_map(commands: Any) -> None:
    map_ = _command(commands, "map", _map, "Where a disk holds data, and where it reads as zeros.")
    map_.add_argument("image", metavar="IMAGE", type=_existing, help=_IMAGE)
    _add_disk(map_)


def _add_compare(commands: Any) -> None:
    compare = _command(
        commands,
        "compare",
        _compare,
        "Compare the content of two disks of any format. Exit code 0: the same, 1: different, 2 and more: not known."
        " The rest of the larger disk may be zeros, unless --strict. --key-file is for the encrypted disks.",
    )
    compare.add_argument("first", metavar="FIRST", type=_existing, help=_IMAGE)
    compare.add_argument("second", metavar="SECOND", type=_existing, help="the same")
    _add_disk(compare)
    compare.add_argument("--second-disk", metavar="NAME", help="the same of the second one; by default --disk")
    compare.add_argument("--strict", action="store_true", help="sizes must be the same, too")
    _add_threads(compare)


_COMMANDS: dict[str, Callable[[Any], None]] = {
    "info": _add_info,
    "convert": _add_convert,
    "verify": _add_verify,
    "map": _add_map,
    "compare": _add_compare,
}


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about.partition(". ")[0].rstrip("."),
        description=about,
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run, parser=command)
    # An option before the command stays valid.
    command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    command.add_argument("--key-file", metavar="FILE", type=_existing, help="holds the passphrase of an encrypted image")
    return command


def _add_disk(command: argparse.ArgumentParser) -> None:
    command.add_argument("--disk", metavar="NAME", help="which disk, where there are several: `disk info` lists their names")


def _add_threads(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--threads", metavar="N", type=_threads, help="how many workers, up to 64; by default one for each core"
    )


def _existing(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("a file is needed, and this text is empty")
    path = Path(text)
    if not os.path.lexists(path):
        from synvirt.nearest import did_you_mean_file

        near = did_you_mean_file(path)
        raise argparse.ArgumentTypeError(f"{text} does not exist" + (f"; {near}" if near else ""))
    return path


def _threads(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to 64")
    return int(text)


def _print_json(value: dict[str, Any]) -> None:
    import json

    print(json.dumps(value))
