"""Plain command lines of `synvirt disk`, read without argparse: that takes as long to load as half of what a copy needs.

A line is plain if each of its words means the same anywhere in it: the command, its files, of which the first exists, and
options without a value. All others, and all wrong ones, are for `parsing`, which reads a plain line in the same way.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple


class _Plain(NamedTuple):
    """The names of a command's files and of its options without a value; and the values of those that are not plain."""

    files: tuple[str, ...]
    flags: tuple[str, ...]
    others: dict[str, Any]


_PLAIN = {
    "info": _Plain(("image",), ("json",), {"key_file": None, "root": None}),
    "convert": _Plain(
        ("image", "target"),
        ("json", "force", "verify"),
        {"disk": None, "ledger": None, "threads": None, "key_file": None, "root": None},
    ),
}


def plain(arguments: Sequence[str]) -> SimpleNamespace | None:
    """The options of a plain command line, as `parsing.parsed` would give them, without its `parser`; else None."""
    command, words = "".join(arguments[:1]), arguments[1:]
    if command not in _PLAIN:
        return None
    known = _PLAIN[command]
    flags = {word for word in words if word.startswith("-")}
    files = [word for word in words if word not in flags]
    if not flags <= {f"--{flag}" for flag in known.flags} or len(files) != len(known.files) or "" in files:
        return None
    if not os.path.lexists(files[0]):
        return None
    return SimpleNamespace(
        command=command,
        **known.others,
        **{flag: f"--{flag}" in flags for flag in known.flags},
        **{name: Path(file) for name, file in zip(known.files, files, strict=True)},
    )
