"""The HTTP interface, put together: routes, who may call, errors, the OpenAPI document."""

import threading
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel

from synvirt import __version__
from synvirt.api.document import described
from synvirt.api.gate import Authenticate, Gate
from synvirt.api.migrations import migrations_router
from synvirt.api.problems import install
from synvirt.api.stream import Pace
from synvirt.migrations.intake import Intake
from synvirt.settings import Settings


class Health(BaseModel):
    status: str
    version: str


def create_app(
    intake: Intake,
    settings: Settings,
    *,
    authenticate: Authenticate,
    routers: tuple[APIRouter, ...] = (),
    pace: Pace | None = None,
) -> FastAPI:
    """`routers` are mounted beside /migrations, behind the same door. `app.state.stopping` ends the streams once it is set."""
    base_url = "/" + settings.base_url.strip("/") if settings.base_url.strip("/") else ""
    api_prefix = f"{base_url}/api/v1"
    app = FastAPI(
        title="SynVirt",
        version=__version__,
        description="Brings virtual machines home. Errors are RFC 9457 problems with an E_ code, a detail and a hint.",
        openapi_url=None,  # served below, complete
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    stopping = threading.Event()
    app.state.stopping = stopping

    migrator = APIRouter(prefix=f"{api_prefix}/migrator")
    migrator.include_router(migrations_router(intake, stopping=stopping.is_set, pace=pace or Pace()))
    for router in routers:
        migrator.include_router(router)
    app.include_router(migrator)

    @app.get("/healthz", tags=["service"])
    def health() -> Health:
        """The service answers and its store can be read."""
        intake.store.last_event_id()
        return Health(status="ok", version=__version__)

    app.openapi = cache(lambda: described(app, api_prefix=api_prefix))  # type: ignore[method-assign]

    @app.get("/openapi.json", include_in_schema=False)
    def document() -> dict[str, Any]:
        return app.openapi()

    app.add_middleware(Gate, authenticate=authenticate)
    install(app)
    return app
