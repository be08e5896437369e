"""A remote file on the command line: its URL, and its credentials, which are in no argument."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

import typer

from synvirt.cli.secret import secret


@dataclass(frozen=True, slots=True, kw_only=True)
class ElsewhereOptions:
    """The options of a command that takes a URL."""

    login: Annotated[
        str | None,
        typer.Option(metavar="USER", help="Of a URL: the user; the password is asked for [env: SYNVIRT_REMOTE_PASSWORD]"),
    ] = None
    credentials: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of a URL: a TOML file with username, password, …")
    ] = None
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="Of an s3:// URL: the server that is not AWS")] = None
    region: Annotated[str | None, typer.Option(metavar="REGION", help="Of an s3:// URL: its region")] = None
    remote_fingerprint: Annotated[
        str | None, typer.Option(metavar="SHA256", help="Of an https:// URL: the certificate to trust")
    ] = None


_ANY_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SCHEMES = ("http://", "https://", "s3://", "smb://")
# The names in the environment: ours, and those of every S3 tool.
_VARIABLES = {
    "http": {"token": "SYNVIRT_REMOTE_TOKEN"},
    "https": {"token": "SYNVIRT_REMOTE_TOKEN"},
    "s3": {
        "access_key_id": "AWS_ACCESS_KEY_ID",
        "secret_access_key": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
    },
    "smb": {"domain": "SYNVIRT_REMOTE_DOMAIN"},
}


def is_url(path: str) -> bool:
    """Whether the argument is the URL of a remote file. BadRequest for a URL of a kind that is not read."""
    if path.lower().startswith(_SCHEMES):
        return True
    scheme = _ANY_SCHEME.match(path)
    if scheme is not None:  # the rest may hold a password
        from synvirt.errors import BadRequest

        raise BadRequest(f"{scheme[0]} is not read", hint=f"copy the file here, or name it by {', '.join(_SCHEMES)}")
    return False


def request(
    url: str,
    given: ElsewhereOptions,
    *,
    environ: "os._Environ[str] | dict[str, str]" = os.environ,
    ask: Callable[[str], str] | None = None,
) -> dict[str, Any]:
    """The body of POST /remote-files/inspect; with `kind`, a plan's source_ref.

    Credentials come from the file, else from the environment. For a user without a password, the command asks for it.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    credentials = _of_file(given.credentials) if given.credentials is not None else _of_environment(scheme, environ)
    user, password, url = _without_login(scheme, rest) if scheme != "s3" else ("", "", url)
    user = given.login or user
    if scheme == "smb" and ";" in user:  # smb://DOMAIN;user@host, the form of other tools
        credentials["domain"], _, user = user.partition(";")
    if user and "token" not in credentials:
        credentials["username"] = user
        password = credentials.get("password") or password or environ.get("SYNVIRT_REMOTE_PASSWORD", "")
        credentials["password"] = password or (ask or secret)(f"Password of {user}")
    options = {
        "fingerprint_sha256": given.remote_fingerprint,
        "endpoint": given.endpoint
        or (environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") if scheme == "s3" else None),
        "region": given.region or (environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") if scheme == "s3" else None),
    }
    return {"url": url, "credentials": credentials, "options": {key: value for key, value in options.items() if value}}


def _without_login(scheme: str, rest: str) -> tuple[str, str, str]:
    """User and password of a URL, and the URL without them. The domain of smb://DOMAIN;user@… stays with the user."""
    authority, slash, path = rest.partition("/")
    login, at, host = authority.rpartition("@")
    user, _, password = login.partition(":")
    # A signed URL's query may have an @, but its host comes first.
    if not at or "?" in authority:
        return "", "", f"{scheme}://{rest}"
    return unquote(user), unquote(password), f"{scheme}://{host}{slash}{path}"


def _of_environment(scheme: str, environ: "os._Environ[str] | dict[str, str]") -> dict[str, str]:
    return {name: environ[variable] for name, variable in _VARIABLES[scheme].items() if environ.get(variable)}


def _of_file(path: Path) -> dict[str, str]:
    import tomllib

    from synvirt.errors import BadRequest, text_of

    try:
        content = tomllib.loads(text_of(path))
    except (tomllib.TOMLDecodeError, RecursionError):
        raise BadRequest(f"{path} is not a TOML file", hint='one line for each credential: password = "…"') from None
    if not all(isinstance(value, str) for value in content.values()):
        raise BadRequest(f"{path}: every credential is a text in quotes")
    return dict(content)
