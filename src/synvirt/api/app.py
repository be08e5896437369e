"""The HTTP interface, assembled: routes, authentication, errors, the OpenAPI document."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from pydantic import BaseModel
from starlette.responses import RedirectResponse

from synvirt import __version__
from synvirt.api.callers.coming import Coming
from synvirt.api.callers.gate import KNOWN, Authenticate, Gate
from synvirt.api.callers.oidc import oidc
from synvirt.api.callers.origin import SameOrigin
from synvirt.api.callers.roles import connects_out, needed_role, shows_key
from synvirt.api.callers.sessions import Sessions
from synvirt.api.document import described
from synvirt.api.metrics import Metrics, Timed, metrics_router
from synvirt.api.problems import AsPage, install
from synvirt.api.routes.audit import Audited, audit_router, write
from synvirt.api.routes.migrations import migrations_router
from synvirt.api.routes.peer import confined
from synvirt.api.routes.tokens import find_token, tokens_router
from synvirt.api.routing import AlsoUnder
from synvirt.api.security_headers import Headed
from synvirt.api.stream import Pace
from synvirt.api.strict import Heads, known_parameters
from synvirt.doctor import Finding, needs_met
from synvirt.migrations.intake import Intake
from synvirt.model.values import Time
from synvirt.settings import Settings
from synvirt.store import Store

# Clients that have one address for all of a service, that of the migrator, find these there.
ALSO = ("waves", "tokens", "audit")


class Checkup(BaseModel):
    """What `synvirt doctor` says of this host: `ok` is false where the service lacks what it needs as it is set."""

    checked_at: Time
    ok: bool
    checks: list[Finding]


class Health(BaseModel):
    """`detail` for known callers only, and only once the checks of the service's start are done."""

    status: str
    version: str
    detail: Checkup | None = None


@dataclass(frozen=True)
class Site:
    """The pages, mounted at {base_url}. `as_page`: makes a page of an error; None: browsers get problems, too."""

    routers: tuple[APIRouter, ...] = ()
    as_page: AsPage | None = None


def create_app(
    intake: Intake,
    settings: Settings,
    *,
    authenticate: Authenticate,
    routers: tuple[APIRouter, ...] = (),
    pages: Callable[[Callable[[], bool]], Site] = lambda stopping: Site(),
    pace: Pace | None = None,
    checkup: Callable[[], tuple[datetime, list[Finding]] | None] = lambda: None,
) -> FastAPI:
    """`routers` are mounted next to /migrations, behind the same gate; so is the result of `pages`, at {base_url}: `pages` gets
    what says that its streams must end. `checkup`: the doctor's last result, at once. `app.state.stopping` ends the streams;
    other mounted parts add to `app.state.metrics`; `app.state.coming` counts refused log-ins, see `counts_written`."""
    base_url = "/" + settings.base_url.strip("/") if settings.base_url.strip("/") else ""
    api_prefix = f"{base_url}/api/v1"
    app = FastAPI(
        title="SynVirt",
        version=__version__,
        description=(
            "Moves virtual machines to KVM. Errors are RFC 9457 problems with an E_ code, a detail and a hint. "
            f"{', '.join(ALSO)} are served under /api/v1/migrator, too."
        ),
        openapi_url=None,  # served below, complete
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    stopping = threading.Event()
    app.state.stopping = stopping

    # Each by itself: of a router in a router FastAPI makes the routes a third time.
    for router in (migrations_router(intake, stopping=stopping.is_set, pace=pace or Pace()), *routers):
        app.include_router(router, prefix=f"{api_prefix}/migrator", dependencies=[Depends(known_parameters)])
    site = pages(stopping.is_set)
    for page in site.routers:
        app.include_router(page, prefix=base_url, include_in_schema=False)
    if site.routers and base_url:

        @app.get(base_url, include_in_schema=False)
        def page_begins() -> Response:
            """The page's links begin at its slash; people leave it out."""
            return RedirectResponse(f"{base_url}/")

    @app.get("/healthz", tags=["service"], response_model_exclude_none=True)
    def health(request: Request) -> Health:
        """The service answers and its store can be read. Known callers also see what this host has and lacks."""
        intake.store.last_event_id()
        found = checkup() if request.scope.get(KNOWN) else None
        detail = None if found is None else Checkup(checked_at=found[0], ok=needs_met(found[1]), checks=found[1])
        return Health(status="ok", version=__version__, detail=detail)

    metrics = Metrics(
        intake.store,
        intake.board,
        host=settings.host_id,
        jobs_at_once=settings.jobs_at_once,
        refusals=lambda: coming.refused,
    )
    app.include_router(metrics_router(metrics))
    app.openapi = cache(lambda: described(app, api_prefix=api_prefix))  # type: ignore[method-assign]

    # Written once: it is half a megabyte, and to write it takes many times its memory.
    written = cache(lambda: json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode())

    @app.get("/openapi.json", include_in_schema=False)
    def document() -> Response:
        return Response(written(), media_type="application/json")

    store = intake.store
    for router in (tokens_router(store.tokens), audit_router(store.audit)):
        app.include_router(router, prefix=api_prefix, dependencies=[Depends(known_parameters)])
    coming = _guard(app, settings, store, authenticate, base_url=base_url, api_prefix=api_prefix)
    app.add_middleware(Timed, metrics=metrics, prefixes=(f"{api_prefix}/migrator", api_prefix))
    app.add_middleware(AlsoUnder, names=ALSO, prefix=api_prefix, also=f"{api_prefix}/migrator")
    app.state.metrics, app.state.coming = metrics, coming
    install(app, site.as_page)
    return app


def _guard(
    app: FastAPI, settings: Settings, store: Store, authenticate: Authenticate, *, base_url: str, api_prefix: str
) -> Coming:
    """Adds what a request passes before its route, the last added first; answers where refused log-ins are counted."""
    provider, note = oidc(settings), partial(write, store.audit)
    coming = Coming(note)
    app.add_middleware(Heads)
    app.add_middleware(SameOrigin, connects_out=lambda path: connects_out(path.removeprefix(base_url)))
    # A peer's packs are not audited: thousands an hour, and the repository shows them. A caller that has left is noted too.
    app.add_middleware(
        Audited,
        write=note,
        quiet=(f"{api_prefix}/backup/peer/", f"{base_url}/logout"),
        shows_key=lambda path: shows_key(path.removeprefix(base_url)),
    )
    app.add_middleware(
        Gate,
        authenticate=authenticate,
        confined=confined(settings, api_prefix),
        base_url=base_url,
        needed=needed_role,
        find_token=find_token(store.tokens),
        coming=coming,
        proxies=settings.trusted_proxies,
        sessions=Sessions(
            authenticate.version,
            path=settings.keyring_dir / "sessions",
            grants="" if provider is None else provider.grants,
        ),
        oidc=provider,
    )
    app.add_middleware(Headed, tls=settings.tls)
    return coming
