"""The common part of all commands: errors as `code: detail` and a hint on stderr, never a traceback; the exit codes.

0 done · 1 the job failed, or the service refused or is not there · 2 wrong usage · 128 and the number of a signal that ended it
"""

import errno
import os
import sys
from collections.abc import Iterable

from synvirt.errors import BadRequest, DiskWriteFailed, Internal, SynvirtError
from synvirt.texts import printable

# What Python says where no folder for temporary files takes one (tempfile.gettempdir): its disk is full.
_NO_TEMPORARY = "No usable temporary directory"
# What a disk says that takes nothing more, whichever file a command writes there.
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# What it says of a path that a person named wrongly: too long, of a file where a folder must be, closed to this user.
_WRONG_PATH = frozenset({errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOENT, errno.EACCES, errno.EPERM})
FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130


def failed(error: Exception, *, as_json: bool = False, of_backups: bool = False) -> int:
    """Prints an error of any command; returns the exit code. With SYNVIRT_LOG_LEVEL=debug, foreign errors are raised.

    `as_json`: also on stdout, as `print_error_as_json` does, so that a script that reads the answer finds the error there.
    `of_backups`: common mistakes have the codes of backups.
    """
    if not isinstance(error, SynvirtError) and os.environ.get("SYNVIRT_LOG_LEVEL") == "debug":
        raise error
    ours = error if isinstance(error, SynvirtError) else _ours(error)
    if of_backups:
        from synvirt.model import backup_codes

        ours = backup_codes.of_backups(ours)
    if as_json:
        print_error_as_json(ours)
    print_error(ours.code, ours.detail, ours.hint)
    # BadRequest: an option or a setting is wrong, wherever that was found.
    return WRONG_USAGE if isinstance(ours, BadRequest) else FAILED


def _unnamed(error: OSError) -> str:
    """What was written where the error names no file."""
    if _NO_TEMPORARY in str(error):
        return "a temporary file"
    return "the standard output" if drop_what_was_refused() else "the standard output, or a file of this command,"


def _ours(error: Exception) -> SynvirtError:
    """A foreign error, named by its cause."""
    if isinstance(error, OSError) and (error.errno in _DISK_FULL or _NO_TEMPORARY in str(error)):
        what = f"{error.filename or _unnamed(error)} cannot be written: {error.strerror}"
        return DiskWriteFailed(what, hint="free some space there, or name another folder")
    if isinstance(error, OSError) and error.errno in _WRONG_PATH and error.filename is not None:
        return BadRequest(f"{error.filename} cannot be used: {error.strerror}")
    from synvirt.jobs.shortage import shortage_of  # a command without errors does not need it

    if (lacks := shortage_of(error)) is not None:
        return Internal(
            f"this command cannot go on: {lacks}",
            hint="this host or its user has too many processes or open files, or too little memory: ulimit -u, -n, -v, and the "
            "unit's TasksMax, LimitNOFILE and MemoryMax",
        )
    if "not JSON compliant" in str(error):  # json's words, of nan and inf
        return BadRequest("a number is needed, and nan and inf are none that a service takes")
    if "surrogates not allowed" in str(error):  # json's, httpx's and pydantic's own errors all end with Python's words
        # A file's name of other bytes. What works on files here takes it; nothing that is JSON can have it.
        return BadRequest("a file's name is not UTF-8, and the service takes no other", hint="rename the file")
    detail = f"something unexpected went wrong in this command: {type(error).__name__}: {error}"
    return Internal(detail, hint="SYNVIRT_LOG_LEVEL=debug shows where; please report it")


def drop_what_was_refused() -> bool:
    """Drops what a closed terminal or a full disk did not take: Python would try again at its end, and end with 120. Whether
    there was anything."""
    refused = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            refused = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return refused


def code_at_end(code: int) -> int:
    """The exit code, once everything that was printed is written: a disk may be full, and who reads may have gone."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if code == 0 and not isinstance(error, BrokenPipeError):
            return failed(error)
        drop_what_was_refused()
        return code or FAILED
    return code


def print_error_as_json(error: SynvirtError) -> None:
    """Prints an error on stdout as the API answers it, a problem; and as `error` what a person needs of it, for scripts that
    tell errors by that."""
    import json

    brief = {"code": error.code, "detail": error.detail, "hint": error.hint}
    problem = {"type": "about:blank", "title": error.title(), "status": error.status, **brief, "error": brief}
    try:
        print(json.dumps(problem))
    except BrokenPipeError:
        raise
    except OSError:  # unbuffered, and the disk is full: stderr says the same
        drop_what_was_refused()


def print_error(code: str, detail: str, hint: str | None) -> None:
    """Prints an error and its hint on stderr."""
    print(f"{code}: {shown(detail)}", file=sys.stderr)
    if hint:
        print(f"hint: {shown(hint)}", file=sys.stderr)


def say(text: str, *, as_json: bool) -> None:
    """Prints a line for people: on stderr, if stdout is JSON."""
    print(shown(text), file=sys.stderr if as_json else sys.stdout, flush=True)


def sheet(rows: Iterable[tuple[str, str]]) -> list[str]:
    """What is known of one thing, as lines for people: each a name and a value, the values below each other."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:{width}} {shown(value)}".rstrip() for name, value in rows]


def print_sheet(rows: Iterable[tuple[str, str]]) -> None:
    """Prints what `sheet` makes."""
    for line in sheet(rows):
        print(line)


def shown(text: str) -> str:
    """A text for a terminal."""
    return printable(text)


def value_text(value: object) -> str:
    """A value of a document for people: lists and objects as JSON, with names as they are written."""
    if isinstance(value, list | dict | bool):
        import json

        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)
