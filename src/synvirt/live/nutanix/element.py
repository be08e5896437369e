"""Prism Element: what only the cluster itself serves, and VMs if no Prism Central is given. Blocking code.

v3 (`/api/nutanix/v3`): vms, vm_snapshots, data/changed_regions (these two are in no public document: the vendor's own backup
partners and three public programs call them), images. v2 (`/api/nutanix/v2.0`): virtual_disks, storage_containers, power.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from synvirt.errors import SnapshotFailed, SourceUnreachable, VmNotFound
from synvirt.live.nutanix.making import Noted
from synvirt.live.nutanix.pages import Page, joined
from synvirt.live.nutanix.prism import (
    Absent,
    Broken,
    Prism,
    Refused,
    described,
    dig,
    listed,
    number,
    of_newest,
    pauses,
    quoted,
    text,
)
from synvirt.live.nutanix.regions import QUESTIONS_MAX, Region, answered
from synvirt.live.odd import check_count

V3: Final = "/api/nutanix/v3"
V2: Final = "/api/nutanix/v2.0"
# v3's lists have at most 500 entries per answer.
PAGE: Final = 500
SNAPSHOT_TIMEOUT_S: Final = 1800.0
IMAGE_TIMEOUT_S: Final = 6 * 3600.0


def _uuid(entity: dict[str, Any]) -> str:
    return text(entity, "metadata", "uuid")


class Element:
    """Prism Element's API, v3 and v2."""

    def __init__(self, prism: Prism) -> None:
        self.prism = prism

    @property
    def host(self) -> str:
        return self.prism.host

    def serves_snapshots(self) -> bool:
        """Prism Central answers 404 there, so this distinguishes the two."""
        try:
            self.prism.ask("POST", f"{V3}/vm_snapshots/list", what="list snapshots", json={"kind": "vm_snapshot", "length": 1})
        except (Absent, Refused):
            return False
        return True

    def version(self) -> str:
        """The version of the cluster's AOS."""
        found = self.prism.ask("GET", f"{V2}/cluster", what="say its version").json()
        return text(found, "version") or "unknown"

    # ── VMs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def vms(self) -> list[dict[str, Any]]:
        """All VMs as v3 describes them, fetched by four requests at a time."""

        def page(at: int) -> Page:
            found = self._page("vms", "vm", at)
            return Page(at, listed(found.get("entities")), number(dig(found, "metadata", "total_matches")))

        def pages() -> Iterator[Page]:
            first = page(0)
            check_count(self.host, f"POST {V3}/vms/list", first.total or 0)
            yield first
            with ThreadPoolExecutor(4) as pool:
                yield from pool.map(page, range(PAGE - 1, first.total or 0, PAGE - 1))

        return joined(self.host, "vms", _uuid, pages)

    def _all(self, what: str, kind: str) -> list[dict[str, Any]]:
        """All entries of a list that does not say how many they are."""

        def pages() -> Iterator[Page]:
            for start in range(0, QUESTIONS_MAX * (PAGE - 1), PAGE - 1):
                check_count(self.host, f"POST {V3}/{what}/list", start)
                page = Page(start, listed(self._page(what, kind, start).get("entities")))
                yield page
                if len(page.entries) < PAGE:
                    return

        return joined(self.host, what, _uuid, pages)

    def _page(self, what: str, kind: str, offset: int) -> dict[str, Any]:
        wanted = {"kind": kind, "offset": offset, "length": PAGE}
        found = self.prism.ask("POST", f"{V3}/{what}/list", what=f"list {what}", json=wanted).json()
        return found if isinstance(found, dict) else {}

    def vm(self, vm_id: str) -> dict[str, Any]:
        """A VM as v3 describes it. VmNotFound."""
        try:
            found = self.prism.ask("GET", f"{V3}/vms/{quoted(vm_id)}", what=f"look at {vm_id}").json()
        except Refused as error:
            if isinstance(error, Absent) or error.http in (400, 422):
                raise VmNotFound(f"{self.host} has no VM {vm_id[:60]}") from error
            raise
        return found if isinstance(found, dict) else {}

    def power_state(self, vm_id: str) -> str:
        return text(self.vm(vm_id), "status", "resources", "power_state").upper()

    def changes_counted(self, vm_id: str) -> int | None:
        """How often this VM was changed, switched or configured: `vm_logical_timestamp`, which v2 compares before it switches a
        VM. None: this cluster does not report it."""
        try:
            found = self.prism.ask("GET", f"{V2}/vms/{quoted(vm_id)}", what=f"look at {vm_id}").json()
        except Refused:
            return None
        return number(dig(found, "vm_logical_timestamp")) or None

    def set_power(self, vm_id: str, transition: str) -> None:
        """v3's own PUT answers 405 on Prism Element."""
        self.prism.ask(
            "POST", f"{V2}/vms/{quoted(vm_id)}/set_power_state", what=f"power {vm_id}", json={"transition": transition}
        )

    def describe(self, vm_id: str, note: str) -> None:
        """Adds a line to the VM's description, once; tried again where somebody else changes the VM meanwhile."""

        def change() -> None:
            found = self.vm(vm_id)
            found.pop("status", None)
            spec = found.get("spec")
            if not isinstance(spec, dict):
                return
            present = text(spec, "description")
            if (wanted := described(present, note)) != present:
                spec["description"] = wanted
                self.prism.ask("PUT", f"{V3}/vms/{quoted(vm_id)}", what=f"describe {vm_id}", json=found)

        of_newest(change)

    # ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────────────

    def snapshots(self) -> list[dict[str, Any]]:
        """All vm_snapshots of the cluster, as v3 describes them."""
        return self._all("vm_snapshots", "vm_snapshot")

    def take(self, vm_id: str, name: str, expires_ms: int, *, quiesce: bool) -> str:
        """Takes a snapshot; its id. SnapshotFailed."""
        wanted = {
            "metadata": {"kind": "vm_snapshot"},
            "spec": {
                "name": name,
                "snapshot_type": "APPLICATION_CONSISTENT" if quiesce else "CRASH_CONSISTENT",
                "expiration_time_msecs": expires_ms,
                "resources": {"entity_uuid": vm_id},
            },
        }
        try:
            made = self.prism.ask("POST", f"{V3}/vm_snapshots", what=f"snapshot {vm_id}", json=wanted).json()
        except Absent as error:
            raise VmNotFound(f"{self.host} has no VM {vm_id[:60]} to snapshot") from error
        except Refused as error:
            raise SnapshotFailed(error.detail) from error
        return text(made, "metadata", "uuid")

    def snapshot(self, snapshot_id: str) -> dict[str, Any]:
        """The snapshot, once it is complete. SnapshotFailed: it failed, or is gone."""
        for _ in pauses(SNAPSHOT_TIMEOUT_S):
            try:
                found = self.prism.ask("GET", f"{V3}/vm_snapshots/{quoted(snapshot_id)}", what="look at a snapshot").json()
            except Absent as error:
                raise SnapshotFailed(f"snapshot {snapshot_id} no longer exists on {self.host}") from error
            state = text(found, "status", "state").upper()
            if state == "COMPLETE":
                return dict(found)
            if state == "ERROR":
                raise SnapshotFailed(f"{self.host} could not make snapshot {snapshot_id}")
        raise SnapshotFailed(f"{self.host} did not make snapshot {snapshot_id} within {SNAPSHOT_TIMEOUT_S:.0f} s")

    def remove(self, snapshot_id: str) -> None:
        """Removes a vm_snapshot; one that is gone is no error."""
        try:
            self.prism.ask("DELETE", f"{V3}/vm_snapshots/{quoted(snapshot_id)}", what="remove a snapshot")
        except Absent:
            return

    def regions(self, path: str, since: str | None) -> Iterator[Region]:
        """Where `path`, a snapshot's file, differs from `since`; without `since`, all that was ever written. Refused: one of
        the two is not, or no longer, a snapshot's file."""
        start = 0
        for _ in range(QUESTIONS_MAX):
            wanted: dict[str, Any] = {"snapshot_file_path": path, "start_offset": start}
            if since is not None:  # null is answered with 422
                wanted["reference_snapshot_file_path"] = since
            found = self.prism.ask("POST", f"{V3}/data/changed_regions", what="say what changed", json=wanted).json()
            regions, following = answered(self.host, dig(found, "region_list"), dig(found, "next_offset"), start)
            yield from regions
            if following is None:
                return
            start = following
        raise SourceUnreachable(f"{self.host} does not finish the list of what changed in {path}")

    def virtual_disk(self, disk_id: str) -> dict[str, Any] | None:
        """None: it is attached to nothing, like the file in a CD-ROM drive."""
        try:
            found = self.prism.ask("GET", f"{V2}/virtual_disks/{quoted(disk_id)}", what="look at a disk").json()
        except (Refused, Broken):
            return None
        return found if isinstance(found, dict) else None

    # ── containers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def containers(self) -> list[dict[str, Any]]:
        return listed(dig(self.prism.ask("GET", f"{V2}/storage_containers", what="list containers").json(), "entities"))

    def change_container(self, container: dict[str, Any]) -> None:
        self.prism.ask("PUT", f"{V2}/storage_containers", what="change a container's allow-list", json=container)

    def common_allow_list(self) -> list[str]:
        """The addresses and networks that may mount the cluster's containers, unless a container has a list of its own."""
        found = self.prism.ask("GET", f"{V2}/cluster", what="look at the cluster").json()
        kept = dig(found, "nfs_subnet_whitelist")
        return [str(one) for one in kept] if isinstance(kept, list) else []

    # ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def images(self, name: str) -> list[tuple[str, str, int]]:
        """The images whose names begin with `name`: id, name, size in bytes."""
        return [
            (_uuid(one), text(one, "status", "name"), number(dig(one, "status", "resources", "size_bytes")))
            for one in self._all("images", "image")
            if text(one, "status", "name").startswith(name)
        ]

    def make_image(self, name: str, vm_id: str, disk_id: str, noted: Noted) -> None:
        """Makes an image of a disk. `noted`: its task is noted before the wait; v3 knows no ids of requests. SnapshotFailed."""
        wanted = {
            "metadata": {"kind": "image"},
            "spec": {
                "name": name,
                "resources": {"image_type": "DISK_IMAGE", "data_source_reference": {"kind": "vm_disk", "uuid": disk_id}},
            },
        }
        try:
            made = self.prism.ask("POST", f"{V3}/images", what="make an image", json=wanted).json()
        except Refused as error:
            raise SnapshotFailed(error.detail) from error
        task_id = text(made, "status", "execution_context", "task_uuid")
        noted.task(task_id)
        for _ in pauses(IMAGE_TIMEOUT_S):
            task = self.task(task_id)
            match text(task, "status").upper():
                case "SUCCEEDED":
                    return
                case "FAILED" | "ABORTED":
                    raise SnapshotFailed(f"{self.host} could not make image {name}: {text(task, 'error_detail')[:300]}")
        raise SnapshotFailed(f"{self.host} did not make image {name} within {IMAGE_TIMEOUT_S:.0f} s")

    def task(self, task_id: str) -> Any:
        return self.prism.ask("GET", f"{V3}/tasks/{quoted(task_id)}", what="look at a task").json()

    def sent_again(self, request: Mapping[str, Any]) -> str:
        """As of Central. No request is noted here: v3 knows no ids of requests."""
        return ""

    def remove_image(self, image_id: str) -> None:
        """Removes an image; one that is gone is no error."""
        try:
            self.prism.ask("DELETE", f"{V3}/images/{quoted(image_id)}", what="remove an image")
        except Absent:
            return

    def image_path(self, image_id: str) -> str:
        return f"{V3}/images/{quoted(image_id)}/file"
