"""prism_api: Nutanix AHV by Prism Central, Prism Element or both. The LiveAdapter; its parts: this package's docstring.

    endpoint ─▶ Central or Element? ─▶ control plane: Central's v4 where there is one, else Element's v3
                                   └▶ ways of reading (ways.py): one for all disks of a VM, chosen when it is inspected

All calls block: each method runs in a thread.
"""

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Final

from synvirt.disks.specs import ReaderSpec
from synvirt.errors import AuthFailed, BadRequest, CbtUnsupported, Internal, SnapshotFailed, SourceUnreachable, VmNotFound
from synvirt.live import About, SnapshotRef, SourceAccess, VmRow
from synvirt.live.nutanix import images, power, rights, snapshots, volumes
from synvirt.live.nutanix.allow_list import AllowList
from synvirt.live.nutanix.central import Central
from synvirt.live.nutanix.element import Element
from synvirt.live.nutanix.form import FORM, Login, Options
from synvirt.live.nutanix.guest_facts import guest_facts
from synvirt.live.nutanix.machines import FoundVm, manifest, row
from synvirt.live.nutanix.making import Making, Which
from synvirt.live.nutanix.prism import Absent, Prism, Where, dig, text
from synvirt.live.nutanix.ways import ORDER, Way, WayName, chosen
from synvirt.live.odd import reading
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.plan import Shutdown
from synvirt.model.sources import SourceCheck
from synvirt.transport import Trust

__all__ = ["FORM", "Login", "Options", "PrismApi"]

PORT: Final = 9440

# Where a snapshot is whose Prism is not there, and a hint.
_NOT_THERE: Final[dict[Which, tuple[str, str]]] = {
    "central": (
        "Prism Central, and the source's endpoint is none, or serves no VMs now",
        "name that Prism Central as the endpoint again, and the cluster in options.prism_element",
    ),
    "element": (
        "Prism Element that is not named any more, or lists no snapshots now",
        "name the cluster in options.prism_element again; without it the snapshot stays until it expires",
    ),
}


class PrismApi:
    """A VM's id is its UUID, the same at both Prisms; a change id belongs to the way of its snapshot."""

    def __init__(self, access: SourceAccess) -> None:
        place, self._login, self._options = FORM.read(access)
        self._folder, self._recorder, self._making = access.folder, access.recorder, Making(access.folder)
        self._origin = _origin(str(place.host), int(place.port or PORT))
        options = self._options
        self._element_origin: str | None = None
        if options.prism_element is not None:
            other = FORM.place(options.prism_element)
            self._element_origin = _origin(str(other.host), int(other.port or PORT))
        if (self._login.element_user is None) != (self._login.element_password is None):
            raise BadRequest("credentials: element_user and element_password must be given together")
        self._open: list[Prism] = []
        self._central: Central | None = None
        self._element: Element | None = None
        self._closed: dict[str, str | None] = {}

    @property
    def kind(self) -> LiveKind:
        return LiveKind.PRISM_API

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def connect(self) -> None:
        await asyncio.to_thread(self._connect)

    def _connect(self) -> None:
        self._shut()
        first = self._prism(self._origin, self._options.fingerprint_sha256)
        if self._element_origin is None and Element(first).serves_snapshots():
            self._element = Element(first)
            return
        central = Central(first, self._element_at)
        if central.serves("vmm") is not None:
            self._central = central
        if self._element_origin is not None:
            element = Element(self._prism(self._element_origin, self._pin_of_element(self._element_origin), of_element=True))
            if element.serves_snapshots():
                self._element = element
        if self._central is None and self._element is None:
            raise Internal(
                f"{first.host} serves neither Prism Central's v4 API nor a cluster's snapshots",
                hint="Prism Central pc.2024.3 or later, or the cluster's own Prism Element; of an older Prism Central name the "
                "cluster in options.prism_element",
            )

    def _pin_of_element(self, origin: str) -> str | None:
        """One host may be both: a cluster with its own Prism Central, whose certificate is pinned once."""
        options = self._options
        return options.element_fingerprint_sha256 or (options.fingerprint_sha256 if origin == self._origin else None)

    def _prism(self, origin: str, pin: str | None, *, of_element: bool = False) -> Prism:
        user, password = self._login.user, self._login.password
        if of_element and self._login.element_user is not None and self._login.element_password is not None:
            user, password = self._login.element_user, self._login.element_password
        trust = Trust(self._options.verify_tls, pin)
        made = Prism(Where(origin, trust, user, password.get_secret_value()), recorder=self._recorder)
        self._open.append(made)
        return made

    def _element_at(self, address: str) -> Prism:
        """With a token of Prism Central: no password is sent there."""
        origin = self._element_origin or _origin(address, PORT)
        return Prism(Where(origin, Trust(self._options.verify_tls, self._pin_of_element(origin))))

    async def rest(self) -> None:
        """The next user asks again which ways to a disk are closed, but not what serves the API."""
        self._closed = {}

    async def close(self) -> None:
        await asyncio.to_thread(self._shut)

    def _shut(self) -> None:
        for prism in self._open:
            prism.close()
        self._open, self._central, self._element, self._closed = [], None, None, {}

    def _control(self) -> power.Control:
        if self._central is not None:
            return power.ByCentral(self._central)
        if self._element is not None:
            return power.ByElement(self._element)
        raise SourceUnreachable("there is no session: connect first")

    # ── checks of a source ───────────────────────────────────────────────────────────────────────────────────────────

    async def about(self) -> About:
        return await asyncio.to_thread(self._about)

    def _about(self) -> About:
        control = self._control()
        found = control.vms()
        product = "Nutanix Prism Central" if self._central is not None else "Nutanix Prism Element"
        allowed = list(self._rights(len(found)))
        # The ways, too, would miss what we are not shown.
        ways = self._ways_checked(found) if all(one.ok for one in allowed) else []
        return About(product, self._version(), (*ways, *allowed))

    def _version(self) -> str:
        if self._central is None:
            return self._element.version() if self._element is not None else ""
        with suppress(AuthFailed):  # reported by its own check
            for one in self._central.all("clustermgmt", "config/clusters", "say its version"):
                if "PRISM_CENTRAL" in (dig(one, "config", "clusterFunction") or ()):
                    return f"{text(one, 'config', 'buildInfo', 'version')}, API {self._central.version('vmm')}"
        return f"API {self._central.version('vmm')}"

    def _rights(self, count: int) -> Iterator[SourceCheck]:
        """By name, as far as Prism Central shows rights; for Prism Element, that it shows VMs and snapshots."""
        if self._central is not None:
            yield from rights.of_central(self._central, self._login.user)
        detail = f"{self._login.user} sees {count or 'no'} VM{'' if count == 1 else 's'}"
        hint = None if count else f"is there none? If there is: {rights.HINT}"
        yield SourceCheck(name="privilege: see VMs", ok=True, warning=not count, detail=detail, hint=hint)

    def _ways_checked(self, found: list[FoundVm]) -> list[SourceCheck]:
        """With a VM that has a disk, and only the containers of its disks."""
        vm = next((one for one in found if one.disks), None)
        if vm is None:
            return []
        closed = self._why_closed(self._control().vm(vm.id))
        way = chosen(self._options.transport, closed)
        if not way.open:
            hint = "name the cluster in options.prism_element, or let this host in to its containers"
            return [SourceCheck(name="ways", ok=False, detail=f"no way to read disks is open: {way.why}", hint=hint)]
        checks = [SourceCheck(name="ways", ok=True, detail=f"disks are read by {way.description}")]
        checks += [
            SourceCheck(name=f"way {name}", ok=True, warning=why is not None, detail=why or "open")
            for name, why in closed.items()
        ]
        return checks

    async def supports_warm(self) -> bool:
        """By its Prisms alone; the disks of a VM may not allow it."""
        return self._options.transport != "image" and (
            self._element is not None or (self._central is not None and self._central.serves("dataprotection") is not None)
        )

    # ── discovery ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def list_vms(self) -> list[VmRow]:
        return await asyncio.to_thread(self._list_vms)

    def _list_vms(self) -> list[VmRow]:
        control = self._control()
        with reading(self._origin, "for its VMs"):
            return [row(vm) for vm in control.vms()]

    async def inspect(self, vm_id: str) -> VmManifest:
        return await asyncio.to_thread(self._inspect, vm_id)

    def _inspect(self, vm_id: str) -> VmManifest:
        control = self._control()
        with reading(self._origin, f"for VM {vm_id[:60]}"):
            vm = control.vm(vm_id)
            return manifest(vm, self._way(vm))

    async def guest_facts(self, vm_id: str) -> dict[str, str]:
        return await asyncio.to_thread(lambda: guest_facts(self._control().vm(vm_id)))

    def _way(self, vm: FoundVm) -> Way:
        return chosen(self._options.transport, self._why_closed(vm))

    def _why_closed(self, vm: FoundVm) -> Mapping[WayName, str | None]:
        """For each way, what closes it; asked once per session for each set of containers."""
        containers = sorted({disk.container for disk in vm.disks if disk.container})
        answers: dict[WayName, str | None] = {}
        for name in ORDER:
            kept = f"{name} {containers if name == 'nfs' else vm.cluster_id}"
            if kept not in self._closed:
                self._closed[kept] = self._why(name, vm, containers)
            answers[name] = self._closed[kept]
        return answers

    def _why(self, name: WayName, vm: FoundVm, containers: list[str]) -> str | None:
        if self._options.transport not in ("auto", name):
            return f"options.transport is {self._options.transport}"
        if name == "nfs":
            return self._snapshots().closed(containers) if self._element is not None else "no Prism Element is named"
        if name == "iscsi":
            return self._volumes().closed(vm) if self._central is not None else "no Prism Central is named"
        return None

    # ── snapshots and bytes ──────────────────────────────────────────────────────────────────────────────────────────

    def _snapshots(self) -> snapshots.Snapshots:
        if self._element is None:
            raise SnapshotFailed("its snapshot is on a Prism Element that is not named any more", hint="options.prism_element")
        allow_list = AllowList(self._element, self._folder, self._options.client_address)
        return snapshots.Snapshots(self._element, self._options, allow_list)

    def _volumes(self) -> volumes.Volumes:
        if self._central is None:
            raise SnapshotFailed("its recovery point is on a Prism Central that is not the source's endpoint any more")
        return volumes.Volumes(self._central, self._options, self._making)

    def _images(self) -> images.Images:
        return images.Images(self._maker(), self._making)

    def _maker(self) -> Central | Element:
        """Who makes images, and whatever else takes a task."""
        maker = self._central or self._element
        if maker is None:
            raise SourceUnreachable("there is no session: connect first")
        return maker

    async def enable_cbt(self, vm_id: str, disks: Collection[str]) -> None:
        """Nothing is switched on, as any two snapshots can be compared."""
        reason = (await self.inspect(vm_id)).cbt_reason
        if reason is not None:
            raise CbtUnsupported(f"the changes of {vm_id} are not known: {reason}", hint="move it cold")

    async def snapshot(self, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        return await asyncio.to_thread(self._snapshot, vm_id, name, disks)

    def _snapshot(self, vm_id: str, name: str, disks: Collection[str] | None) -> SnapshotRef:
        vm = self._control().vm(vm_id)
        way = self._way_of_job(vm, name)
        if not way.open:
            raise SnapshotFailed(f"the disks of {vm.name} cannot be read: {way.why}")
        self._making.note_on(name, "element" if way.name == "nfs" or self._central is None else "central")
        match way.name:
            case "nfs":
                return self._snapshots().take(vm, name, disks)
            case "iscsi":
                self._making.note_on(name, "points")
                ref = self._volumes().take(vm, name, disks)
                return ref.model_copy(update={"id": f"{ref.id} {name}"})
            case "image":
                return self._images().take(vm, name, disks)

    def _way_of_job(self, vm: FoundVm, name: str) -> Way:
        """The way of the job's earlier snapshots, which the next is compared with. So a server that is away for a moment closes
        a way only to new jobs."""
        stem, _, number = name.rpartition("-")
        if self._element is not None and self._options.transport in ("auto", "nfs") and self._snapshots().began(vm.id, stem):
            return Way("nfs")
        earlier = f"{stem}-{int(number) - 1}" if number.isdecimal() else ""
        by_iscsi = self._central is not None and self._options.transport in ("auto", "iscsi")
        if by_iscsi and earlier and self._volumes().began(earlier):
            return Way("iscsi")
        return self._way(vm)

    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        return await asyncio.to_thread(self._open_disk, vm_id, snapshot, disk, since)

    def _open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        """By the way of the snapshot, whatever is open now."""
        vm = self._control().vm(vm_id)
        if snapshot.id.startswith(snapshots.PREFIX):
            return self._snapshots().open(vm, snapshot, disk, since)
        if snapshot.id.startswith(volumes.PREFIX):
            id_, _, name = snapshot.id.partition(" ")
            return self._volumes().open(vm, name, snapshot.model_copy(update={"id": id_}), disk, since)
        if snapshot.id.startswith(images.PREFIX):
            return self._images().open(vm, snapshot, disk, since)
        raise SnapshotFailed(f"{snapshot.id[:100]!r} is no snapshot of a Prism")

    async def release(self, vm_id: str, name: str) -> None:
        """The snapshot stays, as the next one is compared with it. What was made from it for reading is removed."""
        await asyncio.to_thread(self._release, name)

    def _release(self, name: str) -> None:
        if self._central is not None and self._central.serves("volumes") is not None:
            self._volumes().release(name)
        self._images().cleanup(name)

    async def cleanup(self, vm_id: str, name: str) -> None:
        """By every existing way, as another one may have been chosen then."""
        await asyncio.to_thread(self._cleanup, vm_id, name)

    def _cleanup(self, vm_id: str, name: str) -> None:
        """SourceUnreachable, while a part of it is still being made: first of all, as it is not listed before it is made. The
        same, while a part is on a Prism that is not there; the rest is removed before."""
        maker = self._maker()
        self._making.await_end(name, maker.host, maker.task, maker.sent_again)
        self._images().cleanup(name)
        if self._central is not None:
            try:
                self._volumes().cleanup(name)
            except Absent as error:
                # A Prism Central without them has none of ours, unless it had them before.
                if self._making.is_on(name, "points"):
                    raise SourceUnreachable(error.detail, hint="the recovery point is removed once it serves them") from error
            self._making.forget_on(name, "points")
        if self._element is not None:
            self._snapshots().cleanup(vm_id, name)
        prisms: tuple[tuple[Which, object], ...] = (("central", self._central), ("element", self._element))
        for which, prism in prisms:
            if prism is not None:
                self._making.forget_on(name, which)
            elif self._making.is_on(name, which):
                where, hint = _NOT_THERE[which]
                raise SourceUnreachable(f"{name} is on a {where}", hint=hint)
        self._making.forget(name)

    # ── off, on, marked ──────────────────────────────────────────────────────────────────────────────────────────────

    async def shutdown(self, vm_id: str, manner: Shutdown = "polite", timeout_s: float | None = None) -> None:
        off_s = self._options.shutdown_timeout_s if timeout_s is None else timeout_s
        await asyncio.to_thread(lambda: power.shut_down(self._control(), vm_id, off_s, manner))

    async def last_start(self, vm_id: str) -> str:
        return await asyncio.to_thread(self._last_start, vm_id)

    def _last_start(self, vm_id: str) -> str:
        """Prism Element's counter of the VM's changes: a switch on or off counts, and set_power_state compares it. Prism
        Central has no such counter; its `updateTime` is v4's time of the VM's last update."""
        start = self._control().vm(vm_id).start
        counted = None if self._element is None else self._element.changes_counted(vm_id)
        return start if counted is None else f"change {counted}"

    async def power_on(self, vm_id: str) -> None:
        await asyncio.to_thread(lambda: power.power_on(self._control(), vm_id))

    async def mark(self, vm_id: str, note: str) -> None:
        await asyncio.to_thread(self._mark, vm_id, note)

    def _mark(self, vm_id: str, note: str) -> None:
        """A VM that is gone needs no mark, as it cannot start."""
        try:
            self._control().describe(vm_id, note)
        except VmNotFound:
            return


def _origin(host: str, port: int) -> str:
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"
