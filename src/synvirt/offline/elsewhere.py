"""A caller's URL and credentials as a root to import from, with their secrets kept apart. Blocking code.

https://user:pw@host/exports/vm.ova?sig=…
    ─▶ place ─▶ the Remote https://host/exports/, with the secrets, and the path vm.ova
    ─▶ separated ─▶ https://host/exports/vm.ova, which is public, and the secrets, to seal
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import unquote

from pydantic import SecretStr

from synvirt.errors import BadRequest
from synvirt.model.access import RemoteFileRequest, in_words_of
from synvirt.remote import Remote, urls
from synvirt.remote.urls import Url

CREDENTIALS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "http": frozenset({"username", "password", "token"}),
        "https": frozenset({"username", "password", "token"}),
        "s3": frozenset({"access_key_id", "secret_access_key", "session_token"}),
        "smb": frozenset({"username", "password", "domain"}),
    }
)
_HEADER_CREDENTIALS = frozenset({"token", "access_key_id", "session_token"})

Request = TypeVar("Request", bound=RemoteFileRequest)


@dataclass(frozen=True, slots=True)
class Rules:
    """The operator's limits: the settings remote_allowed_hosts and remote_ca_file."""

    allowed_hosts: tuple[str, ...] = ()
    ca_file: Path | None = None


def place(asked: RemoteFileRequest, rules: Rules) -> tuple[Path, Remote]:
    """The path to import, and the Remote with it: the URL's folder. A URL that ends with a slash is the folder itself.

    BadRequest: the URL or the credentials are of an unknown kind.
    """
    url = urls.parse(asked.url)
    folder, slash, name = url.path.rpartition("/")
    if url.scheme == "smb" and "/" not in url.path.strip("/"):
        raise BadRequest("the URL names a host and perhaps a share, but no file", hint="smb://HOST/SHARE/FOLDER/FILE")
    if url.scheme in ("http", "https") and not name:
        raise BadRequest(
            f"{url.shown} is a folder, which HTTP cannot list",
            hint="give the URL of the file that describes the machine: its .ovf, .vmx or .vbox",
        )
    options = asked.options
    remote = Remote(
        url=url.origin + folder + slash,
        query=url.query,
        credentials=_credentials(url, asked),
        verify_tls=options.verify_tls,
        fingerprint_sha256=options.fingerprint_sha256,
        ca_file=None if rules.ca_file is None else str(rules.ca_file),
        region=options.region,
        endpoint=_endpoint(options.endpoint),
        allowed_hosts=rules.allowed_hosts,
    )
    return Path(name if url.scheme == "s3" else unquote(name, errors="surrogateescape")), remote


def separated(asked: Request) -> tuple[Request, bytes | None]:
    """The public part of the request, and its secrets as one text to seal; None, where it has none."""
    url = urls.parse(asked.url)
    secrets = dict(_credentials(url, asked))
    public = asked.model_copy(update={"url": url.shown, "credentials": {}})
    if not secrets and not url.query:
        return public, None
    return public, json.dumps({"query": url.query, "credentials": secrets}).encode()


def joined(public: Request, secrets: bytes | None) -> Request:
    """Joins again what `separated` took apart."""
    if secrets is None:
        return public
    opened = json.loads(secrets)
    url = public.url + (f"?{opened['query']}" if opened["query"] else "")
    credentials = {name: SecretStr(value) for name, value in opened["credentials"].items()}
    return public.model_copy(update={"url": url, "credentials": credentials})


def name_of(asked: RemoteFileRequest) -> str:
    """The name of a job that imports it, if the request gives none."""
    path = urls.parse(asked.url).path.rstrip("/")
    return unquote(path.rpartition("/")[2], errors="replace")[:255] or "remote file"


def _credentials(url: Url, asked: RemoteFileRequest) -> tuple[tuple[str, str], ...]:
    """The given credentials, and those in the URL; sorted, so that the same ones compare equal."""
    takes = CREDENTIALS[url.scheme]
    given = in_words_of(takes, {name: secret.get_secret_value() for name, secret in asked.credentials.items()})
    unknown = set(given) - takes
    if unknown:
        raise BadRequest(
            f"credentials: {url.scheme} has no {', '.join(sorted(unknown))[:100]}",
            hint=f"it has {', '.join(sorted(takes))}",
        )
    if any(not value.isascii() or not value.isprintable() for name, value in given.items() if name in _HEADER_CREDENTIALS):
        raise BadRequest("credentials: a token or a key has characters that none has")
    if url.username and not given:
        domain, semicolon, user = url.username.partition(";")
        given = {"domain": domain, "username": user} if semicolon and url.scheme == "smb" else {"username": url.username}
        given["password"] = url.password
    return tuple(sorted((name, value) for name, value in given.items() if value))


def _endpoint(endpoint: str | None) -> str | None:
    if endpoint is None:
        return None
    url = urls.parse(endpoint)
    if url.scheme not in ("http", "https") or url.username or url.query:
        raise BadRequest("options.endpoint is a URL with a host and a port", hint="for example https://minio.example:9000")
    return url.shown
