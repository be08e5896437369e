"""{base_url}/login: a session instead of the browser's own password box, which keeps the password until the browser closes."""

import re

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from synvirt.api.callers.gate import DOOR, Gate
from synvirt.api.callers.oidc import give_browser, take_browser
from synvirt.api.callers.sessions import give, take
from synvirt.errors import Forbidden, SourceUnreachable, SynvirtError, Unauthorized
from synvirt.web.forms import Sent
from synvirt.web.pages import HEADERS, Pages

# A path of this service: browsers read // and a backslash as another host.
_HERE = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]{0,2000}", re.ASCII)


def login_router(pages: Pages) -> APIRouter:
    """The pages to log in and out."""
    router = pages.router()

    def asked(door: Gate, *, following: str = "", error: SynvirtError | None = None, leave: str = "") -> Response:
        """The log-in page. `leave`: where a person who has logged out here may log out of the OpenID provider."""
        label = "" if door.oidc is None else door.oidc.label
        status = 200 if error is None else error.status
        return pages.page("login.html", status=status, following=following, error=error, provider=label, leave=leave)

    def led(heading: str, url: str) -> Response:
        """A page that continues by itself. It is no redirect: a form's redirect may not leave this site (Content Security
        Policy, form-action), and a browser from another site would not send a cookie with SameSite=Strict."""
        return pages.page("login_led.html", heading=heading, url=url)

    @router.get("/login")
    def ask(request: Request, next: str = "") -> Response:  # noqa: A002 - the word in the address
        return asked(request.scope[DOOR], following=_here(next))

    @router.post("/login")
    async def log_in(sent: Sent, request: Request) -> Response:
        door: Gate = request.scope[DOOR]
        following = _here(sent.text("next"))
        try:
            # A password may begin or end with a space.
            password = next(iter(sent.many("password")), "")
            secret = await door.log_in(request.scope, sent.text("user"), password)
        except (Unauthorized, Forbidden) as error:
            return asked(door, following=following, error=error)
        answer = RedirectResponse(following or f"{pages.root}/", status_code=303, headers=dict(HEADERS))
        give(answer, secret)
        return answer

    @router.post("/login/oidc")
    async def begin_oidc(sent: Sent, request: Request) -> Response:
        door: Gate = request.scope[DOOR]
        following = _here(sent.text("next"))
        try:
            began = await door.begin_oidc(request.scope, following)
        except SourceUnreachable as error:
            return asked(door, following=following, error=error)
        answer = led("To the log-in", began.url)
        give_browser(answer, began.browser)
        return answer

    @router.get("/login/oidc/callback")
    async def end_oidc(request: Request) -> Response:
        door: Gate = request.scope[DOOR]
        try:
            secret, following = await door.end_oidc(request.scope, dict(request.query_params))
        except (Unauthorized, Forbidden, SourceUnreachable) as error:
            answer = asked(door, error=error)
            take_browser(answer)
            return answer
        answer = led("Logged in", following or f"{pages.root}/")
        give(answer, secret)
        take_browser(answer)
        return answer

    @router.post("/logout")
    def log_out(request: Request) -> Response:
        door: Gate = request.scope[DOOR]
        elsewhere = door.log_out(request.scope) and door.oidc is not None and door.oidc.ends
        answer = asked(door, leave=elsewhere) if elsewhere else RedirectResponse(f"{pages.root}/login", 303, dict(HEADERS))
        take(answer)
        return answer

    def _here(path: str) -> str:
        return path if _HERE.fullmatch(path) and path.startswith(f"{pages.root}/") else ""

    return router
