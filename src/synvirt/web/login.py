"""{base_url}/login: a session in place of the browser's own password box, which forgets nothing until it is closed."""

import re

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from synvirt.api.callers.gate import DOOR, Gate
from synvirt.api.callers.sessions import give, take
from synvirt.errors import Forbidden, Unauthorized
from synvirt.web.forms import Sent
from synvirt.web.pages import HEADERS, Pages

# A path of this service: browsers take // and a backslash for another host.
_HERE = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]{0,2000}", re.ASCII)


def login_router(pages: Pages) -> APIRouter:
    router = pages.router()

    @router.get("/login")
    def ask(next: str = "") -> Response:  # noqa: A002 - the word in the address
        return pages.page("login.html", following=_here(next), error=None)

    @router.post("/login")
    async def log_in(sent: Sent, request: Request) -> Response:
        door: Gate = request.scope[DOOR]
        following = _here(sent.text("next"))
        try:
            # A password may begin with a space, or end with one.
            password = next(iter(sent.many("password")), "")
            secret = await door.log_in(request.scope, sent.text("user"), password)
        except (Unauthorized, Forbidden) as error:
            return pages.page("login.html", status=error.status, following=following, error=error)
        answer = RedirectResponse(following or f"{pages.root}/", status_code=303, headers=dict(HEADERS))
        give(answer, secret)
        return answer

    @router.post("/logout")
    def log_out(request: Request) -> Response:
        door: Gate = request.scope[DOOR]
        door.log_out(request.scope)
        answer = RedirectResponse(f"{pages.root}/login", status_code=303, headers=dict(HEADERS))
        take(answer)
        return answer

    def _here(path: str) -> str:
        return path if _HERE.fullmatch(path) and path.startswith(f"{pages.root}/") else ""

    return router
