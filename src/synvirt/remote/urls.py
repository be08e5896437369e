"""URLs of files elsewhere, taken apart: what may be shown, and what is secret (RFC 3986).

    https://user:password@host:8443/exports/vm.ova?X-Amz-Signature=…
            ╰── secret ──╯ ╰────── may be shown ─╯ ╰── secret ────╯

A signed URL is a password: its query is kept with the credentials, and is in no answer, event, log or error.
"""

import string
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from synvirt.errors import BadRequest

PORTS: Final = {"http": 80, "https": 443, "s3": 443, "smb": 445}
# Longer than any server takes; a signed URL has about 1500 characters.
URL_MAX_CHARS: Final = 8192
# Characters that RFC 3986 allows in a path as they are.
_PATH_SAFE: Final = "/-_.~!$&'()*+,;=:@"
# In a query every ASCII character stays, as it may be signed.
_QUERY_SAFE: Final = string.punctuation


@dataclass(frozen=True, slots=True)
class Url:
    """`path` begins with a slash, and is percent-encoded as in a request. For s3, `host` is the bucket, and `path` the key
    without encoding."""

    scheme: str
    host: str
    port: int
    path: str
    query: str = field(default="", repr=False)
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    @property
    def origin(self) -> str:
        """The server for a request; credentials are for one origin only."""
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """HOST[:PORT], without the port where it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def shown(self) -> str:
        """The URL without its secret parts."""
        return self.origin + self.path

    @property
    def target(self) -> str:
        """The target in the request's first line (RFC 9112 section 3.2.1)."""
        return self.path + (f"?{self.query}" if self.query else "")

    def beneath(self, name: str) -> "Url":
        """The file `name`, as people read it, in the folder of this URL."""
        encoded = name if self.scheme == "s3" else quote(name, safe=_PATH_SAFE, errors="surrogateescape")
        return replace(self, path=self.path + encoded)


def parse(text: str) -> Url:
    """BadRequest, which shows nothing of the URL: in a malformed one it is not known where its secrets are."""
    scheme, colon, rest = text.partition("://")
    scheme = scheme.lower()
    if not colon or scheme not in PORTS:
        shown = repr(scheme[:20]) if colon and scheme.isalnum() else "none of them"
        raise BadRequest(
            f"the URL's scheme is {shown}; read are {', '.join(PORTS)}", hint="for example https://host/path/vm.ova"
        )
    if len(text) > URL_MAX_CHARS or any(character <= " " or character == "\x7f" for character in text if scheme != "s3"):
        raise BadRequest(f"the URL has blanks, control characters or over {URL_MAX_CHARS} characters")
    if scheme == "s3":
        bucket, _, key = rest.partition("/")
        return _checked(Url(scheme, bucket, PORTS[scheme], "/" + key))
    try:
        parts = urlsplit(text)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode("ascii")
        path, query = (quote(part, safe=safe + "%") for part, safe in ((parts.path, _PATH_SAFE), (parts.query, _QUERY_SAFE)))
    except (ValueError, UnicodeError):
        raise BadRequest("the URL is malformed, or its host or port is") from None
    return _checked(
        Url(
            scheme,
            host,
            PORTS[scheme] if port is None else port,
            path or "/",
            query,
            unquote(parts.username or ""),
            unquote(parts.password or ""),
        )
    )


def _checked(url: Url) -> Url:
    if not url.host or not all(character.isalnum() or character in "-_.:%" for character in url.host):
        raise BadRequest("the URL names no host" if not url.host else "the URL's host has characters that no host name has")
    if not 0 < url.port < 65536:
        raise BadRequest(f"the URL's port is {url.port}")
    decoded = url.path if url.scheme == "s3" else unquote(url.path)
    if any(character < " " or character == "\x7f" for character in decoded) or ".." in decoded.split("/"):
        raise BadRequest("the URL's path has control characters or «..» in it")
    return url
