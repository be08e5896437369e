"""The common parts of all pages: the look, the headers, error pages, and the few files that they use.

No page runs or styles anything that is not a file of ours (`POLICY`), so that a name from a hostile archive stays a name even
if the templates' escaping had a hole.
"""

import hashlib
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response

from synvirt import __version__
from synvirt.acting import current
from synvirt.api.callers.roles import needed_role
from synvirt.api.problems import incident, refused
from synvirt.api.routing import Routes
from synvirt.errors import NotFound, SynvirtError, Unauthorized
from synvirt.programs import ProgramFailed
from synvirt.sizes import duration, exact_size, percent
from synvirt.web import words
from synvirt.web.labels import as_labels

# Content Security Policy level 3: only files of our own address, nothing inline, not in another site's frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# The words and the address of each entry, in the order of the page's head. An entry without a served page is hidden. The
# template of a page names its entry: {% set here = "/sources" %}.
NAVIGATION = (
    ("Migrations", "/"),
    ("New migration", "/new"),
    ("Waves", "/waves"),
    ("Windows", "/windows"),
    ("Sources", "/sources"),
    ("Uploads", "/uploads"),
    ("Backups", "/backups"),
    ("Doctor", "/doctor"),
    ("Audit", "/audit"),
)
STATIC = Path(__file__).parent / "static"
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


class Pages:
    """`root`: {base_url}, "" at the top. Files are read once: a request looks up a name, and opens nothing."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.files = {path.name: path.read_bytes() for path in sorted(STATIC.rglob("*")) if path.suffix in TYPES}
        self._environment = Environment(
            loader=PackageLoader("synvirt.web"),
            auto_reload=False,  # an upgrade must not mix its templates with our code; and to look costs 10 % of a long page
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        names = (
            "kind_words",
            "rehearsal_tone",
            "rehearsal_words",
            "state_words",
            "visible",
            "tone",
            "problem_tone",
            "size",
            "rate",
            "moment",
            "clock",
            "as_json",
        )
        self._environment.filters |= {
            "duration": duration,
            "exact_size": exact_size,
            "percent": percent,
            "as_labels": as_labels,
        } | {name: getattr(words, name) for name in names}
        self._environment.globals |= {
            "root": root,
            "file": self._address,
            "version": __version__,
            "navigation": self._navigation,
            "who": _logged_in,
            "serves": lambda path: path in self._served(),
        }
        self._routers: list[APIRouter] = []

    def part(self, template: str, /, **values: object) -> str:
        return self._environment.get_template(template).render(values)

    def page(self, template: str, /, *, status: int = 200, **values: object) -> Response:
        return HTMLResponse(self.part(template, **values), status_code=status, headers=HEADERS)

    def add_filters(self, *words: Callable[..., object]) -> None:
        """Adds filters to the templates, each by its own name."""
        self._environment.filters |= {function.__name__: function for function in words}

    def failure(self, error: SynvirtError, status: int | None = None) -> Response:
        """`status`: replaces the error's own."""
        logs_in = isinstance(error, Unauthorized)
        return self.page("failure.html", status=status or error.status, error=error, logs_in=logs_in)

    def _address(self, name: str) -> str:
        """The address with a hash of the content: a browser keeps it permanently, and asks again after an upgrade."""
        return f"{self.root}/static/{name}?{hashlib.sha256(self.files[name]).hexdigest()[:12]}"

    def router(self, endpoints: Mapping[str, Callable[..., Any]] | None = None) -> APIRouter:
        """A router whose errors are pages. `endpoints`: by method and path, "GET /sources"."""
        router = Routes(at=self.root, route_class=_failing_with(self.failure), default_response_class=HTMLResponse)
        for asked, endpoint in (endpoints or {}).items():
            method, path = asked.split()
            router.add_api_route(path, endpoint, methods=[method])
        self._routers.append(router)
        return router

    def see(self, path: str) -> Response:
        """A redirect after a form: reloading its target repeats nothing (RFC 9110, section 15.4.4)."""
        return RedirectResponse(f"{self.root}{path}", status_code=303)

    def ask(
        self,
        question: str,
        subject: str,
        *meaning: str,
        action: str,
        back: str,
        yes: str,
        here: str,
        danger: bool = False,
        hidden: Iterable[tuple[str, str]] = (),
    ) -> Response:
        """A page that asks for confirmation. `here`: the navigation's entry; `hidden`: fields that go with the answer."""
        return self.page(
            "ask.html",
            here=here,
            question=question,
            subject=subject,
            meaning=meaning,
            action=action,
            back=back,
            yes=yes,
            danger=danger,
            hidden=hidden,
        )

    def _navigation(self) -> list[tuple[str, str]]:
        served = self._served()
        act = current()
        return [
            (words, path)
            for words, path in NAVIGATION
            if path in served and (act is None or act.role.reaches(needed_role("GET", path)))
        ]

    def _served(self) -> set[str]:
        return {route.path for router in self._routers for route in router.routes if isinstance(route, APIRoute)}


def _logged_in() -> str:
    """The account that may log out; "" if the request did not use a session."""
    act = current()
    return act.account if act is not None and act.by_session else ""


def _failing_with(failure: Callable[[SynvirtError], Response]) -> type[APIRoute]:
    class Page(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()

            async def answered(request: Request) -> Response:
                try:
                    return await answer(request)
                except ProgramFailed as error:
                    return failure(incident(error))
                except SynvirtError as error:
                    return failure(error)
                except RequestValidationError as error:
                    if any(mistake["loc"][0] == "path" for mistake in error.errors()):
                        return failure(NotFound("there is no such page"))
                    return failure(refused(error.errors()))

            return answered

    return Page


def static_router(pages: Pages) -> APIRouter:
    """The files of the page: style, scripts, icons."""
    router = pages.router()

    @router.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in pages.files:
            raise NotFound("there is no such file")
        headers: Mapping[str, str] = HEADERS | {"Cache-Control": "private, max-age=31536000, immutable"}
        return Response(pages.files[name], media_type=TYPES[Path(name).suffix], headers=dict(headers))

    return router
