"""A running service without an engine: a real store, app and server; the test moves the jobs itself."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from uuid import UUID

import httpx

from synvirt.accounts import FileAccounts, Role, set_password
from synvirt.api import Server, Site, create_app
from synvirt.api.callers.auth import Check, Remembering
from synvirt.api.routes.backups import mount
from synvirt.api.routes.destinations import destinations_router
from synvirt.api.routes.host_files import host_files_router
from synvirt.api.routes.hosts import hosts_router
from synvirt.api.routes.receipts import receipts_router
from synvirt.api.routes.rehearsals import rehearsals_router
from synvirt.api.routes.remote_files import remote_files_router
from synvirt.api.routes.screenshots import screenshots_router
from synvirt.api.routes.sources import sources_router
from synvirt.api.routes.uploads import uploads_router
from synvirt.api.routes.waves import Fleet, mount_waves
from synvirt.api.routes.windows import windows_router
from synvirt.api.stream import Pace
from synvirt.backups.offers import offers_of
from synvirt.backups.restores.host import RestoreHost
from synvirt.destinations import Destination
from synvirt.destinations.directory import DirectoryDestination
from synvirt.doctor import Checkup, Finding
from synvirt.errors import Conflict, Unauthorized
from synvirt.fleet.forecasting import Forecaster
from synvirt.fleet.sheets.importing import SOURCES_MAX, Importer
from synvirt.fleet.waves import Waves
from synvirt.fleet.webhooks.deliveries import Deliveries
from synvirt.fleet.webhooks.events import Hooks
from synvirt.jobs.board import Board
from synvirt.keyring import Keyring
from synvirt.live.registry import BY_KIND, Platform
from synvirt.migrations.hosts.about import Hosts
from synvirt.migrations.intake import Intake
from synvirt.migrations.planning.foreseen import DryRun, PlanProblem
from synvirt.migrations.removing import Removal, volumes_of
from synvirt.migrations.secrets import JobSecrets
from synvirt.migrations.sources.registered import Sources
from synvirt.migrations.uploads import Uploads
from synvirt.model.job import Migration, StateVisit
from synvirt.model.kinds import LiveKind, Mode, OfflineKind, State
from synvirt.model.plan import HostPathRef, MigrationPlan, PlanSource
from synvirt.model.problems import Problem
from synvirt.model.repair import Repair
from synvirt.model.values import now
from synvirt.offline.elsewhere import Rules
from synvirt.proof.keeping import Receipts
from synvirt.proof.signing import HostKey
from synvirt.rehearsals.asking import Rehearsing
from synvirt.settings import Settings
from synvirt.settings.data_dir import prepare_data_dir
from synvirt.store import Store
from synvirt.web import website
from synvirt.web.finding import Finder
from tests.fakes.backups import FakeGuests, backups_of
from tests.fakes.clones import CopyingDirectory

PREFIX = "/api/v1/migrator"
USER, PASSWORD = "admin", "correct horse"
QUICK = Pace(tick_s=0.02, ask_every_s=0.1, ask_elsewhere_every_s=0.1, progress_every_s=0.1, heartbeat_every_s=0.3)
PLAN = MigrationPlan(
    source=PlanSource(Offline=OfflineKind.OVA_ARCHIVE),
    source_ref=HostPathRef(kind="offline_host_path", path="/imports/web.ova"),
    mode=Mode.COLD,
)


def every_role(users: Path, password: str) -> FileAccounts:
    """An account a role, named after it."""
    for role in reversed(Role):
        set_password(users, str(role), password, role)
    return FileAccounts(users)


def only_admin(user: str, password: str, address: str) -> None:
    if (user, password) != (USER, PASSWORD):
        raise Unauthorized("the user or the password is wrong")


def unseen(plan: MigrationPlan) -> DryRun:
    """What a service says whose source does not answer."""
    problem = PlanProblem(field="source_ref", detail="the source does not answer")
    return DryRun(plan=plan, manifest=None, concerns=(), ways=(), forecast=None, differences=(), problems=(problem,))


def no_receipt(job: Migration, check_only: bool) -> Repair:
    """What a service says whose jobs have none."""
    raise Conflict(f"job {job.id} has no receipt to compare its volumes with")


class NoRehearsals:
    """An engine that does nothing: the test moves the rehearsals itself."""

    def __init__(self, screenshots: Mapping[UUID, bytes]) -> None:
        self._screenshots, self.begun = screenshots, list[UUID]()

    def begin(self, rehearsal_id: UUID) -> None:
        self.begun.append(rehearsal_id)

    def screenshot(self, rehearsal_id: UUID) -> bytes | None:
        return self._screenshots.get(rehearsal_id)


class Service:
    """`begin` is called with the id of each new job, as the engine would be. `backups` are real, of `guests` that are files.
    `has_pages`: the page's routes, a third of what it takes to make a service."""

    def __init__(
        self,
        data_dir: Path,
        *,
        check_password: Check = only_admin,
        role_of: Callable[[str], Role] = lambda user: Role.ADMIN,
        check: Callable[[MigrationPlan], None] = lambda plan: None,
        dry_run: Callable[[MigrationPlan], DryRun] = unseen,
        repair: Callable[[Migration, bool], Repair] = no_receipt,
        platforms: Mapping[LiveKind, Platform] = BY_KIND,
        pace: Pace = QUICK,
        idle_s: float = 20,
        restore_host: RestoreHost | None = None,
        has_pages: bool = True,
        **settings: object,
    ) -> None:
        self.settings = Settings.model_validate({"data_dir": data_dir, "listen": "127.0.0.1:0"} | settings)
        prepare_data_dir(self.settings)
        self.board = Board()
        self.store = Store(self.settings.store_url, on_commit=self.board.committed)
        self.begun: list[UUID] = []
        self.destroyed: list[str] = []
        self.screenshots: dict[UUID, bytes] = {}
        self.checkup: tuple[datetime, list[Finding]] | None = None
        self.findings: list[Finding] = []
        self.woken: list[UUID] = []
        self.begin: Callable[[UUID], None] = self.begun.append
        keyring = Keyring(self.settings.keyring_dir / "migrator.key")
        self.intake = Intake(
            self.store,
            self.board,
            host="local",
            check=check,
            begin=self._begin,
            wake=self.woken.append,
            secrets=JobSecrets(self.store, keyring),
            removal=Removal(
                self.store,
                here="local",
                destroy=lambda job: self.destroyed.extend(volumes_of(job)),
                forget=lambda job: None,
            ),
            dry_run=dry_run,
            repair=repair,
        )
        self.uploads = Uploads(self.store.uploads, self.settings)
        folder = data_dir / "sources"
        self.sources = Sources(self.store.sources, keyring, host="local", platforms=platforms, folder=folder)
        self.guests = FakeGuests(data_dir / "guests")
        self.backups = backups_of(self.store, self.guests, data_dir, offers=offers_of(self.settings), restore_host=restore_host)
        rules = Rules(self.settings.remote_allowed_hosts or ("nothing.invalid",))
        self.destinations: dict[str, Destination] = {"directory": DirectoryDestination(self.settings.volumes_dir)}
        self.clonable = CopyingDirectory(self.settings.volumes_dir)
        self.receipts = Receipts(self.settings.receipts_dir, HostKey(self.settings.keyring_dir / "receipts.key", "local"))
        self.rehearsing = Rehearsing(
            self.store,
            NoRehearsals(self.screenshots),
            host="local",
            destination_named=lambda name: self.clonable,
            wake=self.woken.append,
        )
        routers = (
            host_files_router(self.settings.imports_dir),
            uploads_router(self.uploads, idle_s=idle_s),
            sources_router(self.sources),
            destinations_router(self.destinations),
            hosts_router(Hosts(self.store, "local")),
            remote_files_router(rules),
            screenshots_router(self.store, self.screenshots.get),
            receipts_router(self.store, self.receipts),
            rehearsals_router(self.rehearsing),
            windows_router(self.store.windows),
        )
        self.waves = Waves(self.store.waves, own=Hooks(keyring, "local", frozenset(self.settings.wave_commands)))
        deliveries = Deliveries(self.store.wave_hooks)
        importer = Importer(self.waves, lambda: self.sources.page(limit=SOURCES_MAX, cursor=None)[0], self.sources.inventory)
        forecaster = Forecaster(self.waves, self.store, self.sources.rows, host="local", destination="directory")

        def pages(stopping: Callable[[], bool]) -> Site:
            return website(
                self.intake,
                self.settings,
                screenshot=self.screenshots.get,
                sources=self.sources,
                finder=Finder(self.sources, self.uploads, self.destinations, rules, keyring),
                networks=lambda: ["user", "network:default", "bridge:br0"],
                backups=self.backups,
                checkup=Checkup(self.settings, examine=lambda _: self.findings),
                waves=self.waves,
                forecaster=forecaster,
                deliveries=deliveries,
                importer=importer,
                receipts=self.receipts,
                rehearsing=self.rehearsing,
                stopping=stopping,
                pace=pace,
            )

        self.app = create_app(
            self.intake,
            self.settings,
            authenticate=Remembering(check_password, role_of=role_of),
            routers=routers,
            pages=pages if has_pages else lambda stopping: Site(),
            pace=pace,
            checkup=lambda: self.checkup,
        )
        self.backups.start()
        mount(self.app, self.backups, self.settings, pace=pace)
        mount_waves(self.app, Fleet(self.waves, forecaster, importer, deliveries), self.board, self.settings, pace=pace)

    def _begin(self, job_id: UUID) -> None:
        self.begin(job_id)

    def submit(self, plan: MigrationPlan = PLAN) -> Migration:
        return self.intake.submit(plan)

    def move(self, job_id: UUID, state: State, *, error: Problem | None = None) -> Migration:
        def change(job: Migration) -> Migration:
            visits = (*job.history, StateVisit(state=state, at=now()))
            return job.model_copy(update={"state": state, "history": visits, "last_error": error or job.last_error})

        return self.store.change(job_id, self.store.get(job_id).state, change)

    @contextmanager
    def served(self) -> Iterator[Server]:
        """On real sockets, in a thread of its own."""
        server = Server(self.app, self.settings)
        ready = threading.Event()
        thread = threading.Thread(target=server.run, kwargs={"on_ready": ready.set}, daemon=True)
        thread.start()
        try:
            assert ready.wait(60), "the server did not start"
            yield server
        finally:
            server.stop()
            thread.join(60)
            assert not thread.is_alive(), "the server did not stop"

    def local(self) -> httpx.Client:
        """By the Unix socket of the running service, under the migrator's prefix."""
        transport = httpx.HTTPTransport(uds=str(self.settings.socket_path))
        return httpx.Client(transport=transport, base_url=f"http://synvirt{PREFIX}", timeout=60)

    def close(self) -> None:
        self.backups.close()
        self.store.close()


def failed(message: str = "the disk is full") -> Problem:
    return Problem(code="E_MIG_DISK_WRITE_FAILED", message=message, hint="make room", at=now(), state=State.COPYING_FULL)
