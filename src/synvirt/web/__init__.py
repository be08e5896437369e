"""The web page: the API's content, for people. It works without JavaScript, and is kept live by htmx and server-sent events."""

from collections.abc import Callable
from uuid import UUID

from synvirt.api import Site
from synvirt.api.stream import Pace
from synvirt.backups.service import Backups
from synvirt.doctor import Checkup
from synvirt.fleet.forecasting import Forecaster
from synvirt.fleet.sheets.importing import Importer
from synvirt.fleet.waves import Waves
from synvirt.fleet.webhooks.deliveries import Deliveries
from synvirt.migrations.hosts.about import Hosts
from synvirt.migrations.intake import Intake
from synvirt.migrations.sources.registered import Sources
from synvirt.proof.keeping import Receipts
from synvirt.rehearsals.asking import Rehearsing
from synvirt.settings import Settings
from synvirt.web.audit import audit_router
from synvirt.web.backups.jobs import backups_router
from synvirt.web.backups.offers import offers_router
from synvirt.web.backups.points import points_router
from synvirt.web.backups.repositories import repositories_router
from synvirt.web.doctor import doctor_router
from synvirt.web.finding import Finder
from synvirt.web.job import JobView, job_router
from synvirt.web.jobs import jobs_router
from synvirt.web.login import login_router
from synvirt.web.machine import Setup, machine_router
from synvirt.web.new import Beginning, new_router
from synvirt.web.pages import Pages, static_router
from synvirt.web.several import Several, several_router
from synvirt.web.sources import sources_router
from synvirt.web.uploads import uploads_router
from synvirt.web.waves.wave import waves_router
from synvirt.web.windows import windows_router

__all__ = ["website"]


def website(
    intake: Intake,
    settings: Settings,
    *,
    screenshot: Callable[[UUID], bytes | None],
    sources: Sources,
    backups: Backups,
    checkup: Checkup,
    finder: Finder,
    networks: Callable[[], list[str]],
    waves: Waves,
    forecaster: Forecaster,
    deliveries: Deliveries,
    importer: Importer,
    receipts: Receipts | None,
    rehearsing: Rehearsing,
    stopping: Callable[[], bool],
    pace: Pace | None = None,
) -> Site:
    """`screenshot`: of a job, if there is one. `receipts`: None, if the settings switch them off. `networks`: what a guest's
    card can be connected to here, the default first. `stopping` ends the streams."""
    hosts = Hosts(intake.store, settings.host_id)
    path = settings.base_url.strip("/")
    pages, pace = Pages(f"/{path}" if path else ""), pace or Pace()
    beginning, setup = Beginning(pages, sources, finder.uploads), Setup(pages, finder, intake, networks)
    routers = (
        static_router(pages),
        login_router(pages),
        jobs_router(pages, intake, stopping=stopping, pace=pace),
        job_router(JobView(pages, intake, screenshot, rehearsing, receipts, hosts), stopping=stopping, pace=pace),
        new_router(pages, beginning, sources, import_root=settings.imports_dir, looking=finder.looking),
        machine_router(setup, beginning),
        several_router(Several(setup)),
        uploads_router(pages, finder.uploads),
        waves_router(pages, waves, forecaster, deliveries, importer, rehearsing=rehearsing),
        windows_router(pages, intake.store.windows),
        sources_router(pages, sources),
        backups_router(pages, backups),
        points_router(pages, backups),
        repositories_router(pages, backups),
        offers_router(pages, backups.offers),
        doctor_router(pages, checkup),
        audit_router(pages, intake.store.audit),
    )
    return Site(routers, pages.failure)
