"""Puts the parts of backups together."""

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from synvirt.backups.service import Backups
    from synvirt.jobs.inspecting.looking import CagedLooking
    from synvirt.jobs.lease import HostLease
    from synvirt.migrations.rooms import Rooms
    from synvirt.settings import Settings
    from synvirt.store import Store


def make_backups(
    stack: ExitStack,
    settings: "Settings",
    store: "Store",
    rooms: "Rooms",
    *,
    looking: "CagedLooking",
    lease: "HostLease",
) -> "Backups":
    """The backups of this host, with runs and schedule started; `stack` ends them."""
    from synvirt.backups.authors import Authors
    from synvirt.backups.limits import Limits
    from synvirt.backups.offers import offers_of
    from synvirt.backups.repositories import Repositories
    from synvirt.backups.restores.host import RestoreHost
    from synvirt.backups.scheduling import running
    from synvirt.backups.service import Backups
    from synvirt.backups.sources import guest as source
    from synvirt.backups.sources.ways import scratch_folder, sources_of, tpm_folder
    from synvirt.backups.working import Working
    from synvirt.jobs.inspecting.points import CagedPoints
    from synvirt.kvm.connection import Connection
    from synvirt.migrations.removing import retained
    from synvirt.proof.signing import HostKey

    # Its own connection, opened by the first run. The embedded driver is opened only once in a process, and shared.
    connection = Connection(settings.hypervisor_uri, lambda: None)
    stack.callback(connection.close)
    guests = stack.enter_context(source.running(sources_of(connection, store.backups, host=settings.host_id)))
    points = CagedPoints(looking)
    backups = Backups(
        store.backups,
        Repositories(
            store.backups,
            host=settings.host_id,
            keyring=settings.keyring_dir,
            caches=settings.data_dir / "backups",
            allowed_hosts=settings.source_allowed_hosts,
            authors=Authors(HostKey(settings.keyring_dir / "receipts.key", settings.host_id), settings.backup_signers),
            reading=points,
        ),
        host=settings.host_id,
        open_guest=guests.open,
        guest_id=guests.id_of,
        forget_job=guests.forget,
        working=Working(rooms.workers, threads=settings.copy_threads),
        journals=settings.data_dir / "backups",
        offers=offers_of(settings, points),
        not_renewed=lease.failure,
        limits=Limits(
            rooms.slots,
            settings.host_id,
            per_repository=settings.runs_per_repository,
            per_host=settings.backups_at_once,
            per_destination=settings.jobs_per_destination,
        ),
        exports=settings.data_dir / "exports",
        export_roots=settings.backup_export_roots,
        restore_host=RestoreHost(
            hypervisor=rooms.hypervisor,
            connection=connection,
            destinations=rooms.destinations,
            tpm_folder=partial(tpm_folder, connection),
            scratch=lambda: scratch_folder(connection) / "boot-tests",
            screens=settings.data_dir / "boot-tests",
            boot_timeout_s=settings.boot_timeout_s,
            alone=guests.alone,
            read_xml=points.domain_xml,
            exports=rooms.exports,
        ),
    )
    stack.enter_context(running(backups))
    stack.enter_context(retained(backups.remove_older_runs, settings.keep_ended_days))
    return backups
