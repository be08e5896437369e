"""The web page: what the API serves, for people. It reads without JavaScript, and is live by htmx and server-sent events."""

from collections.abc import Callable
from uuid import UUID

from fastapi import APIRouter

from synvirt.api.stream import Pace
from synvirt.doctor import Checkup
from synvirt.migrations.intake import Intake
from synvirt.settings import Settings
from synvirt.web.doctor import doctor_router
from synvirt.web.job import JobView, job_router
from synvirt.web.jobs import jobs_router
from synvirt.web.pages import Pages, static_router

__all__ = ["web_routers"]


def web_routers(
    intake: Intake,
    settings: Settings,
    *,
    screenshot: Callable[[UUID], bytes | None],
    checkup: Checkup,
    stopping: Callable[[], bool],
    pace: Pace | None = None,
) -> tuple[APIRouter, ...]:
    """`screenshot`: of a job, where there is one. `stopping` ends the streams."""
    path = settings.base_url.strip("/")
    pages, pace = Pages(f"/{path}" if path else ""), pace or Pace()
    return (
        static_router(pages),
        jobs_router(pages, intake, stopping=stopping, pace=pace),
        job_router(JobView(pages, intake, screenshot), stopping=stopping, pace=pace),
        doctor_router(pages, checkup),
    )
