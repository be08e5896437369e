"""Puts the parts of migrations together: sources, the rooms of their steps, the engine and its lease, rehearsals, removal."""

from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from synvirt.main.destinations import make_destinations

if TYPE_CHECKING:
    from synvirt.jobs.board import Board
    from synvirt.jobs.inspecting.looking import CagedLooking
    from synvirt.jobs.lease import HostLease, Pausable
    from synvirt.keyring import Keyring
    from synvirt.migrations.engine import Engine
    from synvirt.migrations.hosts.about import AboutHost
    from synvirt.migrations.hosts.taking_over import TakingOver
    from synvirt.migrations.intake import Intake
    from synvirt.migrations.removing import Removal
    from synvirt.migrations.rooms import Rooms
    from synvirt.migrations.secrets import JobSecrets
    from synvirt.migrations.sources.registered import Sources
    from synvirt.migrations.uploads import Uploads
    from synvirt.model.job import Migration
    from synvirt.proof.keeping import Receipts
    from synvirt.rehearsals.asking import Rehearsing
    from synvirt.rehearsals.engine import Rehearsals
    from synvirt.settings import Settings
    from synvirt.store import Store


def make_sources(settings: "Settings", store: "Store", keyring: "Keyring") -> "Sources":
    """The registered sources. From now on the setting source_allowed_hosts limits their hosts."""
    from synvirt import outgoing
    from synvirt.live.registry import BY_KIND as PLATFORMS
    from synvirt.migrations.sources.registered import Sources

    outgoing.permit(settings.source_allowed_hosts)
    return Sources(store.sources, keyring, host=settings.host_id, platforms=PLATFORMS, folder=settings.data_dir / "sources")


def make_engine(
    stack: ExitStack, settings: "Settings", rooms: "Rooms", about: "AboutHost", *, sources: "Sources", secrets: "JobSecrets"
) -> "tuple[Engine, list[Pausable], TakingOver, HostLease]":
    """The engine, not started yet. From now on this process writes to the store under its host's lease, and the kinds of jobs
    in the list run while it holds the lease. Conflict, where another process has it."""
    from synvirt.jobs.lease import HostLease, Pausable, Together
    from synvirt.migrations.engine import Engine
    from synvirt.migrations.hosts.taking_over import TakingOver

    engine = Engine(rooms, host=settings.host_id)
    sources.on_change = rooms.sessions.changed
    kinds: list[Pausable] = [engine]
    together = Together(kinds)
    lease = HostLease(rooms.store, settings.host_id, document=about.document, on_lost=together.pause, on_held=together.resume)
    lease.begin()
    stack.callback(lease.close)
    stack.enter_context(about.kept(lease.renew_soon))
    taking_over = TakingOver(
        rooms,
        begin=engine.begin,
        held_for_s=lease.held_for_s,
        opens_source=sources.check_opens,
        secrets=secrets,
        on_host_lost=settings.on_host_lost,
    )
    return engine, kinds, taking_over, lease


def make_intake(
    store: "Store",
    board: "Board",
    settings: "Settings",
    rooms: "Rooms",
    engine: "Engine",
    *,
    secrets: "JobSecrets",
    removal: "Removal",
    taking_over: "TakingOver",
) -> "Intake":
    """What the API and the page ask of migrations."""
    from synvirt.migrations.intake import Intake, check_corrected, check_free, check_plan
    from synvirt.migrations.planning.foreseen import dry_run
    from synvirt.migrations.planning.repairable import repair_of

    return Intake(
        store,
        board,
        host=settings.host_id,
        check=partial(check_plan, rooms),
        begin=engine.begin,
        wake=engine.wake,
        secrets=secrets,
        removal=removal,
        dry_run=partial(dry_run, rooms),
        check_corrected=partial(check_corrected, rooms),
        claim=partial(check_free, rooms),
        repair=partial(repair_of, rooms),
        taking_over=taking_over,
    )


def make_rehearsals(settings: "Settings", rooms: "Rooms", engine: "Engine") -> "tuple[Rehearsing, Rehearsals]":
    """The rehearsals for the API, and the engine that runs them, which is not started yet."""
    from synvirt.rehearsals.asking import Rehearsing
    from synvirt.rehearsals.engine import Rehearsals

    rehearsals = Rehearsals(rooms, settings.remote_ca_file, settings.data_dir / "rehearsals")
    rehearsing = Rehearsing(
        rooms.store, rehearsals, host=rooms.host, destination_named=rooms.destination_named, wake=engine.wake
    )
    return rehearsing, rehearsals


def make_removal(stack: ExitStack, rooms: "Rooms", settings: "Settings") -> "Removal":
    """The removal of ended jobs, also by the setting keep_ended_days, until `stack` ends."""
    from synvirt.api.routes.audit import expiring
    from synvirt.migrations.removing import Removal, retained, volumes_of

    def destroy(job: "Migration") -> None:
        for volume in volumes_of(job):
            rooms.destination_named(job.destination).destroy(volume)

    def forget(job: "Migration") -> None:
        rooms.hypervisor.forget_screenshot(job.id)
        if rooms.receipts is not None:
            rooms.receipts.forget_hashes(job.id)

    removal = Removal(rooms.store, here=settings.host_id, destroy=destroy, forget=forget)
    stack.enter_context(retained(removal.remove_older, settings.keep_ended_days))
    stack.enter_context(expiring(rooms.store.audit, settings.audit_keep_days))
    return removal


def make_rooms(
    settings: "Settings",
    store: "Store",
    board: "Board",
    uploads: "Uploads",
    *,
    sources: "Sources",
    secrets: "JobSecrets",
    looking: "CagedLooking",
) -> "Rooms":
    """What the steps of migrations work with, by the settings."""
    from synvirt.fleet.sharing import rate_of
    from synvirt.guests.inside.looking import facts_of, loaders_of
    from synvirt.guests.virt_v2v import VirtV2vInPlace
    from synvirt.hypervisor.accel import accelerator
    from synvirt.hypervisor.libvirt_host import LibvirtHost
    from synvirt.jobs.exports import ProcessExports
    from synvirt.jobs.process import started
    from synvirt.jobs.slots import Slots, Turns
    from synvirt.kvm import handing
    from synvirt.kvm.connection import short_root
    from synvirt.main.import_root import resolving
    from synvirt.migrations.rooms import Rooms
    from synvirt.model.kinds import OfflineKind
    from synvirt.offline.elsewhere import Rules
    from synvirt.offline.hyperv.tool import vmcx_tool

    root = settings.imports_dir
    destinations = make_destinations(settings)
    _say_who_guests_are(settings)
    return Rooms(
        store=store,
        board=board,
        import_root=root,
        resolve=resolving(root),
        upload_path=lambda upload_id: uploads.get(upload_id).path,
        importers=looking.importers,
        detect=looking.detect,
        connected=lambda root: nullcontext(),
        secret_of=secrets.opened,
        remote_rules=Rules(settings.remote_allowed_hosts, settings.remote_ca_file),
        connect=sources.connect,
        waiting=sources.waiting,
        check_source=sources.check_plan,
        rates_of=lambda source_id: sources.get(source_id).rates,
        host=settings.host_id,
        slots=Slots(store.slots, host=settings.host_id),
        jobs_per_source=settings.jobs_per_source,
        jobs_per_source_in_all=settings.jobs_per_source_in_all,
        jobs_per_destination=settings.jobs_per_destination,
        turns=Turns(settings.jobs_at_once),
        destinations=destinations,
        hypervisor=LibvirtHost(
            settings.hypervisor_uri,
            settings.data_dir,
            boot_check=settings.boot_check,
            boot_activity_s=settings.boot_activity_s,
        ),
        preparer=VirtV2vInPlace(
            settings.data_dir / "conversions",
            settings.virtio_win_iso,
            settings.virt_tools_dir,
            kvm=lambda: accelerator(settings.data_dir / "libvirt").kind == "kvm",
        ),
        rate_of=partial(rate_of, store.waves),
        receipts=_receipts(settings) if settings.receipts else None,
        exports=ProcessExports(
            lambda: (short_root(settings.hypervisor_uri) or settings.data_dir) / "instant",
            give=partial(handing.to_qemu, settings.hypervisor_uri),
        ),
        passthroughs={OfflineKind.VMCX_EXPORT: vmcx_tool(settings)},
        look_inside=facts_of,
        find_loaders=loaders_of,
        boot_timeout_s=settings.boot_timeout_s,
        copy_threads=settings.copy_threads,
        workers=partial(started, stalled_s=settings.copy_stalled_s),
    )


def _receipts(settings: "Settings") -> "Receipts":
    from synvirt.proof.keeping import Receipts
    from synvirt.proof.signing import HostKey
    from synvirt.proof.stamping import TimeStamps

    key = HostKey(settings.keyring_dir / "receipts.key", settings.host_id)
    stamps = TimeStamps(settings.receipt_tsa, settings.receipt_tsa_roots) if settings.receipt_tsa else None
    return Receipts(settings.receipts_dir, key, stamps)


def _say_who_guests_are(settings: "Settings") -> None:
    """Sets and logs the user that guests run as, before the driver is opened."""
    import structlog

    from synvirt.kvm import qemu_user

    made = qemu_user.decide(settings)
    log = structlog.get_logger("synvirt.hypervisor")
    if made.lacking:
        log.warning("guests of the embedded driver are not confined as they could be", why=made.why, hint="synvirt doctor")
    else:
        log.info("guests of the embedded driver", why=made.why)
