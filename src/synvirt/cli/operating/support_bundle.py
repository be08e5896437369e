"""synvirt support-bundle: one archive for a helper, without secrets.

    logs, doctor, settings, jobs, sources, backups ─▶ redacted ─▶ NAME.tar.gz, mode 0600

It works without the service too, as that is when it is needed. The archive says what is missing; one missing part stops no
other.
"""

import io
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synvirt.cli.options import Options, with_options
from synvirt.cli.program import shown
from synvirt.errors import shortened

if TYPE_CHECKING:
    from synvirt.settings import Settings

# The newest of each: small enough for a mail, and enough for the last days of a busy host.
JOBS_MAX = 500
LOG_BYTES_MAX = 8 << 20
JOURNAL_TIMEOUT_S = 60
# Logs that the service has besides its jobs: `demo.log`, and what an operator redirected there.
LOG_NAMES = "*.log"
# A private key in a log: where it begins, and ends.
KEY_BEGIN, KEY_END = "-----BEGIN ", re.compile(r"-----END [A-Z ]{0,30}PRIVATE KEY-----")


@with_options
def support_bundle(
    options: Options,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE.tar.gz]", help="Where to; default: here, by host and time")
    ] = None,
    log: Annotated[list[Path] | None, typer.Option(help="A log of the service that is elsewhere; may be given again")] = None,
) -> None:
    """Pack what a helper needs to see. That is logs, doctor, settings, jobs and backups: names, but no password, key or token.

    Example: synvirt support-bundle /tmp/help.tar.gz
    Example: synvirt support-bundle --log /var/log/synvirt.log
    """
    import json
    import socket

    from synvirt.errors import Conflict

    options.work_here("a bundle holds the logs and settings of this host", about_service=True)
    settings = options.settings
    name = f"synvirt-{socket.gethostname()}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    target = file or Path(f"{name}.tar.gz")
    if target.exists():
        raise Conflict(f"{target} already exists", hint="name another file")
    packed = _pack(target, name, _parts(options, settings, tuple(log or ())))
    if options.json:
        print(json.dumps({"path": str(target), "files": packed}))
    else:
        print(shortened(f"{shown(str(target))}: {', '.join(packed)}"))
        print("Passwords, keys and tokens are taken out. Names of VMs, hosts and files are in it: look before you send it.")


def _pack(target: Path, name: str, parts: Iterator[tuple[str, str]]) -> list[str]:
    """Writes all of it or nothing; no other user can read it."""
    import tarfile

    from synvirt.errors import DiskWriteFailed

    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    packed = []
    try:
        with (
            os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as made,
            tarfile.open(fileobj=made, mode="w:gz") as archive,
        ):
            for inner, text in parts:
                content = text.encode("utf-8", "replace")
                about = tarfile.TarInfo(f"{name}/{inner}")
                about.size, about.mtime, about.mode = len(content), int(time.time()), 0o600
                archive.addfile(about, io.BytesIO(content))
                packed.append(inner)
        part.rename(target)
    except OSError as error:
        raise DiskWriteFailed(f"{target} cannot be written: {error.strerror}", hint="name a file elsewhere") from error
    finally:
        part.unlink(missing_ok=True)
    return packed


def _known(settings: "Settings") -> tuple[str, ...]:
    """Secrets that this process can see, in each form in which they may be quoted."""
    from urllib.parse import unquote, urlsplit

    url = settings.database_url
    named = ("PASSWORD", "PASSPHRASE", "RECOVERY_KEY", "TOKEN", "SECRET")
    found = [value for variable, value in os.environ.items() if any(word in variable.upper() for word in named)]
    # A driver takes all up to the @; for urlsplit, a password with one of /?# ends there, and with it the host.
    for password in (urlsplit(url).password or "", url.partition("://")[2].rpartition("@")[0].partition(":")[2]):
        found += [password, unquote(password)]
    # A shorter one is part of many words.
    return tuple(sorted({value for value in found if len(value) >= 4}, key=len, reverse=True))


def _parts(options: Options, settings: "Settings", logs: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """The names in the archive, each with its redacted content."""
    from synvirt.redacting import redacted_text

    known = _known(settings)
    for name, ask in (
        ("about", _about),
        ("settings", lambda: _shown_settings(settings)),
        ("doctor", lambda: _doctor(settings)),
        ("migrations", lambda: _jobs(options, settings)),
        ("sources", lambda: _asked(options, "/sources")),
        ("destinations", lambda: _asked(options, "/destinations")),
        ("backup-repositories", lambda: _asked(options, "/backup/repositories")),
        ("backup-jobs", lambda: _asked(options, "/backup/jobs")),
        ("backup-runs", lambda: _backups(options, settings, "run", "/backup/runs")),
        ("restore-points", lambda: _backups(options, settings, "point", "/backup/restore-points")),
    ):
        yield f"{name}.json", _answer_or_reason(ask, known)
    for name, path in _named([*logs, *sorted(settings.data_dir.glob(LOG_NAMES))]):
        yield f"logs/{name}", redacted_text(_end_of(path), known=known)
    if (journal := _journal()) is not None:
        yield "logs/journal", redacted_text(journal, known=known)


def _answer_or_reason(ask: Callable[[], Any], known: tuple[str, ...]) -> str:
    """JSON; or why there is none."""
    import json

    from synvirt.errors import cause_of
    from synvirt.redacting import redacted

    try:
        found = ask()
    except Exception as error:  # what is broken may break in any way: the others are packed all the same
        found = {"missing": f"{type(error).__name__}: {cause_of(error)}"}
    return json.dumps(redacted(found, known=known), indent=1, ensure_ascii=False, default=str) + "\n"


def _about() -> dict[str, str]:
    import platform

    from synvirt import __version__
    from synvirt.model.values import now

    return {"synvirt": __version__, "python": platform.python_version(), "host": platform.platform(), "at": now().isoformat()}


def _shown_settings(settings: "Settings") -> dict[str, Any]:
    """Of a command only its program: each argument may be a secret, a token or a URL that is one, and many do not show it."""
    from synvirt.redacting import GONE

    found = settings.model_dump(mode="json")
    for command in found["wave_commands"].values():
        command["argv"][1:] = [GONE] * len(command["argv"][1:])
    return found


def _doctor(settings: "Settings") -> dict[str, Any]:
    from dataclasses import asdict

    from synvirt.doctor import examine, needs_met

    findings = examine(settings)
    return {"ok": needs_met(findings), "checks": [asdict(finding) for finding in findings]}


def _asked(options: Options, path: str, **asked: Any) -> Any:
    import json

    with options.connect() as client:
        return json.loads(client.ask("GET", path, params=asked))


def _jobs(options: Options, settings: "Settings") -> Any:
    query = "SELECT document FROM migrations ORDER BY number DESC LIMIT ?"
    return _asked_or_read(options, settings, "/migrations", query, ())


def _backups(options: Options, settings: "Settings", kind: str, path: str) -> Any:
    query = "SELECT document FROM backups WHERE kind = ? ORDER BY number DESC LIMIT ?"
    return _asked_or_read(options, settings, path, query, (kind,))


def _asked_or_read(options: Options, settings: "Settings", path: str, query: str, chosen: tuple[str, ...]) -> Any:
    """Asks the service; if it is down, reads its SQLite file read-only."""
    import json
    import sqlite3
    from urllib.parse import quote

    from synvirt.errors import ServiceUnreachable

    try:
        return _asked(options, path, limit=JOBS_MAX)
    except ServiceUnreachable as error:
        if settings.database_url:
            raise
        try:
            with closing(sqlite3.connect(f"file:{quote(str(settings.data_dir / 'migrator.db'))}?mode=ro", uri=True)) as store:
                rows = store.execute(query, (*chosen, JOBS_MAX)).fetchall()
        except sqlite3.Error as away:
            raise OSError(f"{error.detail}; and the store cannot be read: {away}") from away
        return {"service": error.detail, "items": [json.loads(document) for (document,) in rows]}


def _named(paths: list[Path]) -> Iterator[tuple[str, Path]]:
    """Each log once, with a name of its own: those of several folders may have the same."""
    taken = {"journal"}
    for path in {os.path.realpath(one): one for one in paths}.values():
        name, number = path.name, 1
        while name in taken:
            number += 1
            name = f"{path.name}.{number}"
        taken.add(name)
        yield name, path


def _end_of(path: Path) -> str:
    try:
        if not path.is_file():  # nobody may ever write to a named pipe
            return f"{path} is not a file\n"
        with path.open("rb") as file:
            before = max(0, path.stat().st_size - LOG_BYTES_MAX)
            file.seek(before)
            return _whole_lines(file.read(LOG_BYTES_MAX).decode("utf-8", "replace"), is_cut=before > 0)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}\n"


def _whole_lines(text: str, *, is_cut: bool) -> str:
    """The text without a line, or a key of several lines, that begins before it: the rest of those shows no more that it is
    secret."""
    text = text.partition("\n")[2] if is_cut else text
    ended = KEY_END.search(text)
    return text if ended is None or KEY_BEGIN in text[: ended.start()] else text[ended.end() :]


def _journal() -> str | None:
    """The log of the unit `synvirt` in systemd's journal; None without systemd."""
    from synvirt.programs import ProgramFailed, find, run

    if find("journalctl") is None or not Path("/run/systemd/system").is_dir():
        return None
    try:
        argv = ["journalctl", "--unit", "synvirt", "--lines", "50000", "--output", "short-iso", "--no-pager"]
        found = run(argv, timeout_s=JOURNAL_TIMEOUT_S).stdout
        return _whole_lines(found[-LOG_BYTES_MAX:], is_cut=len(found) > LOG_BYTES_MAX)
    except ProgramFailed as error:
        return f"the journal cannot be read: {error}\n"
