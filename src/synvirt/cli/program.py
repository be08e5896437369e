"""What every command has in common: errors as `code: detail` and a hint on stderr, never a traceback; the exit codes.

0 done · 1 the job failed, or the service refused or is not there · 2 wrong usage
"""

import os
import sys

from synvirt.errors import BadRequest, SynvirtError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130


def failed(error: Exception) -> int:
    """Tell an error of any command; the program's exit code. With SYNVIRT_LOG_LEVEL=debug what is not ours is raised."""
    if isinstance(error, SynvirtError):
        tell(error.code, error.detail, error.hint)
        # BadRequest: an option or a setting is wrong, whoever noticed it.
        return WRONG_USAGE if isinstance(error, BadRequest) else FAILED
    if os.environ.get("SYNVIRT_LOG_LEVEL") == "debug":
        raise error
    tell(
        SynvirtError.code,
        f"something unexpected went wrong in this command: {type(error).__name__}: {error}",
        "SYNVIRT_LOG_LEVEL=debug shows where; please report it",
    )
    return FAILED


def tell(code: str, detail: str, hint: str | None) -> None:
    print(f"{code}: {shown(detail)}", file=sys.stderr)
    if hint:
        print(f"hint: {shown(hint)}", file=sys.stderr)


def shown(text: str) -> str:
    """Names come from hostile archives: a terminal must not obey what is in them."""
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def sized(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
