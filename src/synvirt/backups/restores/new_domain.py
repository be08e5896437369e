"""A restore to a new domain: the point's guest next to the others, with a name, a UUID and MAC addresses of its own.

    volumes made ─▶ domain tried: does libvirt take it? ─▶ disks copied ─▶ domain defined ─▶ started, if that is asked for

The volumes are on the default destination, and carry the run's id like a job's; so does the domain.
"""

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from synvirt.backups import domain_parts
from synvirt.backups.model import RestoredDomain, RestorePoint, RestoreRequest, Status
from synvirt.backups.restores import domain as restoring_domain
from synvirt.backups.restores.domain import Place, Rewritten
from synvirt.backups.restores.host import SWTPM_USERS, RestoreHost
from synvirt.backups.restores.new_files import remove_folder
from synvirt.backups.under_way import UnderWay
from synvirt.backups.working import Copying
from synvirt.destinations import Destination, as_away, free_bytes_of
from synvirt.durable import put_private_file, sync_folder
from synvirt.errors import (
    BackupConflict,
    Conflict,
    DiskWriteFailed,
    DomainDefineFailed,
    HostLacks,
    HypervisorAway,
    SynvirtError,
)
from synvirt.hypervisor import Volume
from synvirt.hypervisor.hardware import own_mac
from synvirt.jobs.instant import is_started
from synvirt.jobs.ledger import Ledger, Undo
from synvirt.jobs.orders import DiskOrder
from synvirt.kvm.identity import not_the_drivers
from synvirt.model.job import Domain
from synvirt.repository.manifest import DiskMap, Manifest
from synvirt.repository.specs import PointSpec, RepositorySpec

HOST_LACKS, START_FAILED = "E_BAK_HOST_LACKS", "E_BAK_START_FAILED"


@dataclass(frozen=True)
class Volumes:
    """The volumes of one restore on the destination `name`: by target, their names there."""

    name: str
    destination: Destination
    names: dict[str, str]

    def places(self) -> dict[str, Place]:
        kind = self.destination.device_type
        return {target: Place(self.destination.device(name), kind) for target, name in self.names.items()}

    def fill(self, copying: Copying, target: str, size_bytes: int, reader: PointSpec) -> None:
        """Copies a disk onto its volume; it is durable on return. DestinationAway, where that went away meanwhile."""
        try:
            writer = self.destination.open(self.names[target], size_bytes)
            copying.copy(DiskOrder(key=target, reader=reader, writer=writer))
        except DiskWriteFailed as error:
            raise as_away(self.destination, error) from error


class NewDomain:
    """`resumed`: the run began under an earlier service."""

    def __init__(self, restore_host: RestoreHost, ledger: Ledger, repository: RepositorySpec, *, resumed: bool = False) -> None:
        self._restore_host, self._ledger, self._repository, self._resumed = restore_host, ledger, repository, resumed

    def check(self, point: RestorePoint, request: RestoreRequest) -> None:
        """BackupConflict, if a domain of this host has the name already."""
        name = name_of(point, request)
        if self._restore_host.domain("lookupByName", name) is not None:
            raise BackupConflict(
                f"this host has a domain {name} already", hint="give the restored one another name, or restore in place"
            )

    def restore(self, copying: Copying, manifest: Manifest, point: RestorePoint, request: RestoreRequest) -> None:
        """Makes the volumes, copies the disks and defines the domain, and starts it if asked. A resumed run goes on from its
        watermarks."""
        restore_host, under_way, run_id = self._restore_host, copying.under_way, copying.under_way.run.id
        disks = chosen_disks(manifest, request.disks)
        if self._resumed and self._is_all_there(copying, disks, run_id):
            if request.start:
                self._start(under_way, run_id, point)
            return
        self._refuse_lived(run_id, point)
        self._check_room(copying, manifest, disks)
        domain = self._domain(under_way, point, manifest, request)
        volumes = self._volumes(copying, disks)
        defined = self._over(under_way, domain, volumes.places(), point, request)
        self._ledger.record(run_id, "domain", str(run_id))
        # Once all is copied, a domain is the restored one, to the service after this one too: none is only tried then.
        if not copying.have_all(disks):
            self._try(defined)
        under_way.move(Status.TRANSFERRING)
        for target, disk in disks.items():
            volumes.fill(copying, target, disk.size_bytes, self._spec(manifest, target))
        under_way.move(Status.COMMITTING, domain=RestoredDomain(name=defined.name, uuid=run_id))
        put_tpm(restore_host, self._ledger, run_id, manifest)
        define(restore_host, defined)
        if request.start:
            self._start(under_way, run_id, point)

    def _spec(self, manifest: Manifest, target: str) -> PointSpec:
        return point_spec(self._repository, manifest, target)

    def _domain(self, under_way: UnderWay, point: RestorePoint, manifest: Manifest, request: RestoreRequest) -> Rewritten:
        """A new machine from the point, fitted to this host; its disks have their old places. HostLacks."""
        run_id = under_way.run.id
        domain = restoring_domain.foreign(manifest.sealed.domain_xml, read=self._restore_host.read_xml)
        name = name_of(point, request)
        restoring_domain.renewed(domain, name=name, run_id=run_id, mac=lambda number: own_mac(run_id, str(number)))
        restoring_domain.log_console(domain, str(self._restore_host.hypervisor.console_log(run_id)))
        self._fit(under_way, domain, manifest, starts=request.start and not is_started(under_way.run.instant))
        return domain

    def _over(
        self, under_way: UnderWay, domain: Rewritten, places: dict[str, Place], point: RestorePoint, request: RestoreRequest
    ) -> Domain:
        """The domain with its disks on `places`; differences from the point become warnings."""
        restoring_domain.with_disks(domain, places, wanted=frozenset(request.disks or places))
        for difference in domain.differences:
            under_way.warn(restoring_domain.DIFFERS, difference, point.vm_id)
        return Domain(name=name_of(point, request), uuid=str(under_way.run.id), xml=domain.xml)

    def _is_all_there(self, copying: Copying, disks: dict[str, DiskMap], run_id: UUID) -> bool:
        """Whether the service ended after the guest was defined or started: it may have written since."""
        return copying.have_all(disks) and self._restore_host.domain("lookupByUUIDString", str(run_id)) is not None

    def _refuse_lived(self, run_id: UUID, point: RestorePoint) -> None:
        """BackupConflict, where the guest was started before all of it was copied: then the store is older than the guest, as
        if it was put back from a copy. What the run made is the guest's by now, and is not undone."""
        lived = self._restore_host.hypervisor.lived(run_id) if self._resumed else None
        if lived is not None and lived.trace is not None and lived.is_sure:  # else it may have been defined on trial alone
            self._ledger.replace(run_id, ())
            raise BackupConflict(
                f"the restored guest of {point.vm_name} has been started already, and the store does not know that: the store "
                "is older than the guest, as if it was put back from a copy",
                hint="nothing is copied; the guest and its volumes stay as they are",
            )

    def _fit(self, under_way: UnderWay, domain: Rewritten, manifest: Manifest, *, starts: bool) -> None:
        """Fits the domain to this host: what the host lacks is refused before anything is made, or noted as a difference."""
        restore_host, run_id = self._restore_host, under_way.run.id
        fit(restore_host, self._ledger, run_id, domain, manifest)
        lacks = restoring_domain.lacking(domain, bridges=restore_host.has_bridge, networks=restore_host.has_network)
        if lacks and starts:
            raise HostLacks(
                f"this host lacks {lacks[0]}", hint="restore without start; then give the domain what it needs with virsh edit"
            )
        for one in lacks:
            under_way.warn(
                HOST_LACKS, f"this host lacks {one}: the domain does not start until it is there", manifest.sealed.vm_id
            )

    def _check_room(self, copying: Copying, manifest: Manifest, disks: Iterable[str]) -> None:
        """Before the first volume is made: later the restore itself has taken some."""
        if any(entry.kind == "volume" for entry in self._ledger.of(copying.under_way.run.id)):
            return
        specs = [self._spec(manifest, target) for target in disks]
        needed = sum(copying.working.data_bytes(specs, copying.under_way.stop))
        name, destination = self._restore_host.default()
        free = free_bytes_of(destination)
        if needed > free:
            raise DiskWriteFailed(
                f"the disks have {needed} bytes that are not zeros, and the destination {name} has room for {free}",
                hint="free space there, or restore single disks",
            )

    def _volumes(self, copying: Copying, disks: dict[str, DiskMap]) -> Volumes:
        run_id = copying.under_way.run.id
        volumes = self._named(run_id, disks)
        for target, disk in disks.items():
            name = volumes.names[target]
            self._ledger.record(run_id, "volume", f"{volumes.name} {name}")
            if self._resumed and not volumes.destination.is_there(name):
                copying.forget(target)  # somebody has removed the volume, with what was copied
            volumes.destination.create(name, disk.size_bytes)
        return volumes

    def _named(self, run_id: UUID, disks: dict[str, DiskMap]) -> Volumes:
        """The destination on which the run has begun to make them; else the present default."""
        made = [entry.name for entry in self._ledger.of(run_id) if entry.kind == "volume"]
        name = made[0].partition(" ")[0] if made else self._restore_host.default()[0]
        destination = self._restore_host.destination(name)
        return Volumes(name, destination, {target: destination.volume_name(run_id, target) for target in disks})

    def _try(self, defined: Domain) -> None:
        """libvirt decides what it accepts; it is asked before terabytes are copied."""
        define(self._restore_host, defined)
        self._restore_host.hypervisor.undefine(UUID(defined.uuid), UUID(defined.uuid))

    def _start(self, under_way: UnderWay, run_id: UUID, point: RestorePoint) -> None:
        """Starts the guest. If that fails, the restored parts stay."""
        if self._runs(run_id):
            return  # done under the earlier service
        try:
            self._restore_host.hypervisor.start(run_id)
        except HypervisorAway:
            raise
        except SynvirtError as error:
            under_way.warn(START_FAILED, f"it is restored, and does not start: {error.detail}", point.vm_id)

    def _runs(self, run_id: UUID) -> bool:
        domain = self._restore_host.domain("lookupByUUIDString", str(run_id))
        return domain is not None and bool(domain.isActive())


def point_spec(repository: RepositorySpec, manifest: Manifest, target: str) -> PointSpec:
    """The spec of the point's disk with that target, for a worker."""
    number = next(number for number, named in enumerate(manifest.sealed.disks) if named.target == target)
    return PointSpec(repository=repository, point_id=str(manifest.shown.id), number=number, sha256=manifest.sha256)


def chosen_disks(manifest: Manifest, targets: tuple[str, ...]) -> dict[str, DiskMap]:
    """The disks by target; all, if none is named."""
    pairs = zip(manifest.sealed.disks, manifest.shown.disks, strict=True)
    return {named.target: disk for named, disk in pairs if not targets or named.target in targets}


def fit(restore_host: RestoreHost, ledger: Ledger, run_id: UUID, domain: Rewritten, manifest: Manifest) -> None:
    """Sets this host's firmware with the point's own variables, and KVM if it works. HostLacks."""
    if manifest.sealed.nvram is not None:
        restoring_domain.name_firmware(domain)
        ledger.record(run_id, "variables", str(run_id))
        if not restore_host.hypervisor.keep_variables(run_id, base64.b64decode(manifest.sealed.nvram)):
            domain.differences.append("its UEFI variables are reset: no firmware of this host has such")
    put_firmware(restore_host, run_id, domain)
    if restore_host.hypervisor.emulates():
        restoring_domain.emulated(domain)


def put_firmware(restore_host: RestoreHost, run_id: UUID, domain: Rewritten) -> None:
    """Sets the firmware build for the variables that were kept for that run; any build, if none were. HostLacks."""
    named = Path(domain.firmware or "").name
    if not restoring_domain.has_uefi(domain):
        restoring_domain.without_firmware(domain)
        if named:
            domain.differences.append(f"its firmware is this host's own, not {named}")
        return
    firmware = restore_host.hypervisor.firmware(run_id, secure=restoring_domain.wants_secure_boot(domain))
    if firmware is None:
        raise HostLacks(f"this host lacks the guest's firmware {named or 'OVMF'}", hint="apt-get install ovmf")
    code, variables = firmware
    restoring_domain.with_firmware(domain, code, variables, restore_host.hypervisor.own_variables(run_id))
    if named and named != Path(code).name:
        domain.differences.append(f"its firmware is this host's own {Path(code).name}, not {named}")


def define(restore_host: RestoreHost, defined: Domain, moved: Sequence[Volume] = ()) -> None:
    """HostLacks, with libvirt's message; BackupConflict; HypervisorAway. `moved`: as of the hypervisor's."""
    try:
        restore_host.hypervisor.define(defined, moved)
    except HypervisorAway:
        raise
    except DomainDefineFailed as error:
        raise HostLacks(
            f"libvirt does not accept the guest's domain on this host: {error.detail}",
            hint=error.hint or "export the disks and its domain.xml, change that to what this host has, and define it by virsh",
        ) from error
    except Conflict as error:
        raise BackupConflict(error.detail, hint="give the restored domain another name") from error


def put_tpm(restore_host: RestoreHost, ledger: Ledger, run_id: UUID, manifest: Manifest) -> None:
    """Puts the state of its TPM where libvirt expects it; on return it survives a power cut."""
    if not manifest.sealed.tpm:
        return
    folder = restore_host.tpm_folder() / str(run_id)
    ledger.record(run_id, "tpm", str(folder))
    try:
        for path, content in tpm_files(restore_host, folder, manifest):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            put_private_file(path, content)
            sync_folder(folder)
            sync_folder(folder.parent)
            for one in (folder, path.parent, path):
                restore_host.give(one, SWTPM_USERS)
    except OSError as error:
        raise DiskWriteFailed(f"the state of the guest's TPM cannot be written: {error.strerror}") from error


def tpm_files(restore_host: RestoreHost, folder: Path, manifest: Manifest) -> Iterator[tuple[Path, bytes]]:
    """The files in the folder of libvirt's emulated TPM."""
    root = restoring_domain.parsed(manifest.sealed.domain_xml, restore_host.read_xml).root
    inner = folder / domain_parts.tpm_folder(root)
    for name, content in (manifest.sealed.tpm or {}).items():
        if "/" not in name and not name.startswith("."):
            yield inner / name, base64.b64decode(content)


# ── ledger ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def undo(restore_host: RestoreHost) -> dict[str, Undo]:
    """How ledger entries of restores to new domains are undone, by the kind of entry."""

    def volume(run_id: UUID, name: str) -> None:
        destination, _, its_name = name.partition(" ")
        restore_host.destination(destination).destroy(its_name)

    def export(run_id: UUID, name: str) -> None:
        if restore_host.exports is not None:
            restore_host.exports.end(name)

    def tpm(run_id: UUID, name: str) -> None:
        if Path(name).name == str(run_id):
            remove_folder(Path(name))

    return {
        "claim": lambda run_id, name: None,  # it is only its entry
        "volume": volume,
        "domain": lambda run_id, name: restore_host.hypervisor.undefine(UUID(name), run_id),
        "export": export,
        "variables": lambda run_id, name: restore_host.hypervisor.forget_variables(run_id),
        "tpm": tpm,
    }


def name_of(point: RestorePoint, request: RestoreRequest) -> str:
    """The name of the restored guest."""
    return not_the_drivers(request.name or point.vm_name)
