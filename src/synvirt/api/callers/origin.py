"""Refuses requests that another site makes through a browser that knows our password.

A browser sends its stored password to us from any page that requests our addresses, so a form on another site's page could
cancel a job. Browsers state where a request comes from (Fetch Metadata, `Sec-Fetch-Site`; or `Origin`, RFC 6454, on every POST
since 2020), and no page can forge that: a request from elsewhere that may change something is refused. Other programs send
neither header, and hold their password themselves.
"""

from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from synvirt.api.problems import answered
from synvirt.errors import Forbidden

READING = frozenset({"GET", "HEAD", "OPTIONS"})


class SameOrigin:
    """`connects_out`: paths whose reading makes the service connect elsewhere; other pages may not read those either."""

    def __init__(self, app: ASGIApp, *, connects_out: Callable[[str], bool] = lambda path: False) -> None:
        self._app, self._connects_out = app, connects_out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and (scope["method"] not in READING or self._connects_out(scope["path"]))
        if guarded and _is_foreign(Headers(scope=scope)):
            refusal = Forbidden(
                "the request came from another site's page, and was refused",
                hint="do it on the service's own page, at the address that the browser shows for it",
            )
            await answered(scope, refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_foreign(headers: Headers) -> bool:
    """A proxy in front of us may end TLS: so the scheme is not compared, and `Host` is the caller's."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    try:
        return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    except ValueError:  # it is no address, so not ours
        return True
