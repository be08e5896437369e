"""The command lines of `synvirt disk`, by argparse: the options, the help, and what is wrong with a command line."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from synvirt.errors import shortened

_IMAGE = "a disk image, an OVA, or the folder or description of a VM"


class WrongUsage(Exception):
    """`usage`: the command's; `detail`: what is wrong."""

    def __init__(self, usage: str, detail: str) -> None:
        self.usage, self.detail = usage, detail


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongUsage(self.format_usage(), f"{self.prog}: {shortened(message)}")


class _Command(_Parser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            return super().parse_known_args(args, namespace)
        except WrongUsage:
            self._refuse_unknown(list(args or ()))
            raise

    def _refuse_unknown(self, words: list[str]) -> None:
        """WrongUsage for an option that the command does not have: its value was taken for an image."""
        for word in words[: words.index("--")] if "--" in words else words:
            if word.startswith("--") and _name(word) not in _options(self):
                self.error(_unknown(word, self))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, and the `command`. WrongUsage; SystemExit, after the help was printed."""
    options, unknown = parser_of(arguments).parse_known_args(list(arguments) or ["--help"])
    if unknown:
        options.parser.error(_unknown(unknown[0], options.parser))
    return options


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"{word} is one word too many"
    from synvirt.nearest import did_you_mean

    near = did_you_mean(_name(word), _options(parser))
    return f"there is no option {word}" + (f"; {near}" if near else "")


def _name(option: str) -> str:
    """Without a value: `--disk=vda`."""
    return option.partition("=")[0]


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Those with two dashes, of which the usage names all but the one for help."""
    known = parser.format_usage().replace("[", " ").replace("]", " ").split()
    return [*(one for one in known if one.startswith("--")), "--help"]


def parser_of(arguments: Sequence[str]) -> argparse.ArgumentParser:
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
    commands = parser.add_subparsers(prog=parser.prog, metavar="COMMAND", required=True, parser_class=_Command)
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
        wanted = int(os.environ.get("COLUMNS", "0"))
    except ValueError:
        wanted = 0
    if wanted > 0:
        return wanted
    try:
        return os.get_terminal_size(sys.__stdout__.fileno() if sys.__stdout__ else -1).columns or 80
    except (OSError, ValueError):
        return 80


def _add_info(commands: Any) -> None:
    info = _command(commands, "info", "What an image is: its format, sizes, chain, and how much of it is data.")
    info.add_argument("image", metavar="IMAGE", type=_existing, help=_IMAGE)


def _add_convert(commands: Any) -> None:
    convert = _command(
        commands,
        "convert",
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
    map_ = _command(commands, "map", "Where a disk holds data, and where it reads as zeros.")
    map_.add_argument("image", metavar="IMAGE", type=_existing, help=_IMAGE)
    _add_disk(map_)


def _add_compare(commands: Any) -> None:
    compare = _command(
        commands,
        "compare",
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


def _command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about.partition(". ")[0].rstrip("."),
        description=about,
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    command.set_defaults(command=name, parser=command)
    # An option before the command stays valid.
    command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    command.add_argument("--key-file", metavar="FILE", type=_existing, help="holds the passphrase of an encrypted image")
    command.add_argument(
        "--root",
        metavar="FOLDER",
        type=_existing,
        help="where files that an image names may lie: a folder above the image; by default its own",
    )
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
