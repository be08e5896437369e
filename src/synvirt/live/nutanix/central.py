"""Prism Central's v4 API: VMs, power, recovery points, volume groups, images, tasks. Blocking code.

Paths, fields and enums are those of the vendor's own SDK (PyPI: ntnx-vmm-py-client 4.3.2 and its siblings, Apache-2.0). The
minor version of a namespace is found like in the SDK: OPTIONS /api/NAMESPACE/unversioned/info. If a server does not know that
request, versions are tried from the newest down.
"""

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import uuid4

from synvirt.errors import AuthFailed, SnapshotFailed, SourceUnreachable, VmNotFound
from synvirt.live.nutanix.making import Noted
from synvirt.live.nutanix.pages import Page, joined, windows
from synvirt.live.nutanix.prism import Absent, Prism, Refused, described, dig, listed, number, of_newest, pauses, quoted, text
from synvirt.live.nutanix.regions import QUESTIONS_MAX, Region, answered
from synvirt.live.odd import check_count
from synvirt.transport import Answer

# For each namespace the newest minor version whose fields we know; a newer server serves it too.
KNOWN: Final[Mapping[str, int]] = {
    "vmm": 3,
    "dataprotection": 4,
    "prism": 4,
    "clustermgmt": 3,
    "volumes": 3,
    "networking": 4,
    "iam": 0,
}
# v4's lists have at most 100 entries per answer.
PAGE: Final = 100
TASK_TIMEOUT_S: Final = 6 * 3600.0
POWER_TIMEOUT_S: Final = 600.0
# The unit of comparison: v4's smallest is 32 KiB.
BLOCK_BYTES: Final = 65536
_VERSION: Final = re.compile(r"v4\.(\d{1,2})")
_SCOPE: Final = re.compile(r"/dataprotection/(v4\.\d{1,2}(?:\.[ab]\d{1,2})?)/content")
_PROBES: Final[Mapping[str, str]] = {
    "vmm": "ahv/config/vms",
    "dataprotection": "config/recovery-points",
    "prism": "config/tasks",
    "clustermgmt": "config/clusters",
    "volumes": "config/volume-groups",
    "networking": "config/subnets",
    "iam": "authz/roles",
}


@dataclass(frozen=True, slots=True)
class DiskPoint:
    """A disk in a recovery point: three ids, each of a different object."""

    recovery_point: str
    vm_recovery_point: str
    disk_recovery_point: str

    @property
    def id(self) -> str:
        return f"{self.recovery_point}/{self.vm_recovery_point}/{self.disk_recovery_point}"

    @classmethod
    def of(cls, id_: str) -> "DiskPoint | None":
        parts = id_.split("/")
        return cls(*parts) if len(parts) == 3 else None

    @property
    def reference(self) -> dict[str, Any]:
        """The recovery point of one disk, in the form of v4 requests."""
        return {
            "$objectType": "dataprotection.v4.content.VmDiskRecoveryPointReference",
            "recoveryPointExtId": self.recovery_point,
            "vmRecoveryPointExtId": self.vm_recovery_point,
            "diskRecoveryPointExtId": self.disk_recovery_point,
        }


class _Cluster(NamedTuple):
    """The cluster that answers about changes: its address, the path, and the token for it."""

    prism: Prism
    base: str
    token: str


class Central:
    """`element_at`: a client of the cluster's own Prism at this address, for questions that only it answers."""

    def __init__(self, prism: Prism, element_at: Callable[[str], Prism]) -> None:
        self.prism = prism
        self._element_at = element_at
        self._versions: dict[str, str] = {}

    @property
    def host(self) -> str:
        return self.prism.host

    # ── versions and tasks ───────────────────────────────────────────────────────────────────────────────────────────

    def version(self, namespace: str) -> str:
        """`v4.2`. Absent: this Prism has no v4 of that namespace."""
        if namespace not in self._versions:
            self._versions[namespace] = self._negotiated(namespace)
        return self._versions[namespace]

    def _negotiated(self, namespace: str) -> str:
        most = KNOWN[namespace]
        try:
            answer = self.prism.ask("OPTIONS", f"/api/{namespace}/unversioned/info", what="say its version").json()
            found = _VERSION.fullmatch(text(answer, "data"))
        except Refused:
            found = None
        if found is not None:
            return f"v4.{min(int(found[1]), most)}"
        for minor in range(most, -1, -1):
            path = f"/api/{namespace}/v4.{minor}/{_PROBES[namespace]}"
            try:
                self.prism.ask("GET", path, query={"$page": "0", "$limit": "1"}, what="say its version")
            except Absent:
                continue
            return f"v4.{minor}"
        raise Absent(
            f"{self.host} serves no v4 API of {namespace}",
            http=404,
            message="",
            hint="it takes pc.2024.3 or later, with AOS 7.0",
        )

    def serves(self, namespace: str) -> str | None:
        """Its version, or None."""
        try:
            return self.version(namespace)
        except Absent:
            return None

    def path(self, namespace: str, rest: str) -> str:
        return f"/api/{namespace}/{self.version(namespace)}/{rest}"

    def get(self, namespace: str, rest: str, what: str) -> tuple[dict[str, Any], str]:
        """The object, and its ETag."""
        answer = self.prism.ask("GET", self.path(namespace, rest), what=what)
        found = dig(answer.json(), "data")
        etag = answer.headers.get("etag") or answer.headers.get("x-ntnx-etag") or ""
        return (found if isinstance(found, dict) else {}), etag

    def all(self, namespace: str, rest: str, what: str, **query: str) -> list[dict[str, Any]]:
        """All pages, four at a time."""
        path = self.path(namespace, rest)

        def page(at: tuple[int, int]) -> Page:
            number_, size = at
            wanted = {"$page": str(number_), "$limit": str(size), **{f"${name}": value for name, value in query.items()}}
            found = self.prism.ask("GET", path, query=wanted, what=what).json()
            total = number(dig(found, "metadata", "totalAvailableResults"))
            return Page(number_ * size, listed(dig(found, "data")), total)

        def pages() -> Iterator[Page]:
            first = page((0, PAGE))
            check_count(self.host, f"GET {path}", first.total or 0)
            yield first
            with ThreadPoolExecutor(4) as pool:
                yield from pool.map(page, [*windows(first.total or 0, PAGE)][1:])

        found = joined(self.host, what, lambda one: text(one, "extId") or repr(one), pages)
        check_count(self.host, f"GET {path}", len(found))
        return found

    def do(
        self,
        method: str,
        namespace: str,
        rest: str,
        what: str,
        *,
        json: Any = None,
        etag: str = "",
        noted: Noted | None = None,
    ) -> dict[str, Any]:
        """A request that makes or changes something; waits until its task has ended, and gives the task. `noted`: of a POST
        that makes something, the request is noted before it is sent, and its task before the wait."""
        request_id = str(uuid4())
        if noted is not None:
            noted.request({"namespace": namespace, "rest": rest, "json": json, "id": request_id})
        headers = {"NTNX-Request-Id": request_id, **({"If-Match": etag} if etag else {})}
        try:
            answer = self.prism.ask(method, self.path(namespace, rest), json=json, headers=headers, what=what)
        except (AuthFailed, Refused):
            if noted is not None:
                noted.nothing()
            raise
        task_id = _task_of(answer)
        if not task_id:
            return {}
        if noted is not None:
            noted.task(task_id)
        return self.ended(task_id, what)

    def sent_again(self, request: Mapping[str, Any]) -> str:
        """The task of a request as `do` notes it, which may have been sent before; empty, where it is refused."""
        headers = {"NTNX-Request-Id": request["id"]}
        try:
            path = self.path(request["namespace"], request["rest"])
            return _task_of(self.prism.ask("POST", path, json=request["json"], headers=headers, what="say what it makes"))
        except Refused:
            return ""

    def ended(self, task_id: str, what: str) -> dict[str, Any]:
        """The ended task. SnapshotFailed, where it failed, as all our requests are part of a snapshot."""
        for _ in pauses(TASK_TIMEOUT_S):
            try:
                task = self.task(task_id)
            except Absent:
                continue  # the part of Prism that stores tasks does not have it yet
            match text(task, "status"):
                case "SUCCEEDED":
                    return task
                case "FAILED" | "CANCELED":
                    messages = "; ".join(text(one, "message") for one in listed(task.get("errorMessages"))[:3])
                    raise SnapshotFailed(f"{self.host} cannot {what}: {messages or text(task, 'legacyErrorMessage')}"[:500])
        raise SnapshotFailed(f"{self.host} does not finish a task within {TASK_TIMEOUT_S:.0f} s: {what}")

    def task(self, task_id: str) -> dict[str, Any]:
        return self.get("prism", f"config/tasks/{quoted(task_id)}", "look at a task")[0]

    # ── VMs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def vms(self) -> list[dict[str, Any]]:
        return self.all("vmm", "ahv/config/vms", "list its VMs")

    def vm(self, vm_id: str) -> tuple[dict[str, Any], str]:
        """A VM, and the ETag for a change of it. VmNotFound."""
        try:
            return self.get("vmm", f"ahv/config/vms/{quoted(vm_id)}", f"look at {vm_id}")
        except Refused as error:
            if isinstance(error, Absent) or error.http == 400:  # 400: no UUID
                raise VmNotFound(f"{self.host} has no VM {vm_id[:60]}") from error
            raise

    def power(self, vm_id: str, action: str) -> None:
        """One of power-on, power-off, shutdown (ACPI), guest-shutdown (by NGT)."""

        def change() -> None:
            _, etag = self.vm(vm_id)
            self.do("POST", "vmm", f"ahv/config/vms/{quoted(vm_id)}/$actions/{action}", f"{action} {vm_id}", etag=etag)

        of_newest(change)

    def describe(self, vm_id: str, note: str) -> None:
        """Adds a line to the VM's description, once; tried again where somebody else changes the VM meanwhile."""

        def change() -> None:
            vm, etag = self.vm(vm_id)
            present = text(vm, "description")
            if (wanted := described(present, note)) != present:
                changed = {**vm, "description": wanted}
                self.do("PUT", "vmm", f"ahv/config/vms/{quoted(vm_id)}", f"describe {vm_id}", json=changed, etag=etag)

        of_newest(change)

    def cluster(self, cluster_id: str) -> dict[str, Any]:
        return self.get("clustermgmt", f"config/clusters/{quoted(cluster_id)}", "look at a cluster")[0]

    def names(self, namespace: str, rest: str, id_field: str = "extId") -> dict[str, str]:
        """The names of containers and subnets, by their ids. Empty, where we may not see them: an id serves too."""
        try:
            return {
                text(one, id_field) or text(one, "extId"): text(one, "name") for one in self.all(namespace, rest, "list names")
            }
        except (AuthFailed, Refused):
            return {}

    # ── recovery points ──────────────────────────────────────────────────────────────────────────────────────────────

    def points(self, name: str) -> list[dict[str, Any]]:
        """The recovery points of exactly that name."""
        found = self.all("dataprotection", "config/recovery-points", "list recovery points", filter=f"name eq '{name}'")
        return [one for one in found if one.get("name") == name]

    def take(self, vm_id: str, name: str, expires: str, *, quiesce: bool, noted: Noted) -> None:
        """Makes a recovery point. `expires`: an RFC 3339 time at which Prism removes it by itself. `noted`: see `do`.
        SnapshotFailed."""
        wanted = {
            "$objectType": "dataprotection.v4.config.RecoveryPoint",
            "name": name,
            "recoveryPointType": "APPLICATION_CONSISTENT" if quiesce else "CRASH_CONSISTENT",
            "expirationTime": expires,
            "vmRecoveryPoints": [{"$objectType": "dataprotection.v4.config.VmRecoveryPoint", "vmExtId": vm_id}],
        }
        try:
            what = f"make a recovery point of {vm_id}"
            self.do("POST", "dataprotection", "config/recovery-points", what, json=wanted, noted=noted)
        except Absent as error:
            raise VmNotFound(f"{self.host} has no VM {vm_id[:60]} to make a recovery point of") from error
        except Refused as error:
            raise SnapshotFailed(error.detail) from error

    def point(self, point_id: str) -> dict[str, Any]:
        """SnapshotFailed: it is gone."""
        try:
            return self.get("dataprotection", f"config/recovery-points/{quoted(point_id)}", "look at a recovery point")[0]
        except Absent as error:
            raise SnapshotFailed(f"recovery point {point_id} no longer exists on {self.host}") from error

    def remove(self, namespace: str, rest: str, what: str) -> None:
        """Removes a thing; one that is gone is no error."""

        def change() -> None:
            _, etag = self.get(namespace, rest, what)
            self.do("DELETE", namespace, rest, what, etag=etag)

        with suppress(Absent):
            of_newest(change)

    def regions(self, point: DiskPoint, since: DiskPoint | None, size: int) -> Iterator[Region]:
        """Refused: one of the two is gone. The cluster's token is valid for some 15 minutes: a refused one is replaced."""
        found_at = self._discovered(point, since)
        start, renewed = 0, False
        try:
            for _ in range(QUESTIONS_MAX):
                if start >= size:
                    return
                try:
                    found = self._asked_regions(found_at, point, since, start)
                except AuthFailed:
                    if renewed:
                        raise
                    found_at.prism.close()
                    found_at, renewed = self._discovered(point, since), True
                    continue
                renewed = False
                extra = {text(one, "name"): one.get("value") for one in listed(dig(found, "metadata", "extraInfo"))}
                rows = dig(found, "data")
                if rows is None and extra:
                    rows = []  # v4 leaves empty lists out
                regions, following = answered(self.host, rows, extra.get("nextOffset"), start)
                yield from regions
                if following is None:
                    return
                start = following
        finally:
            found_at.prism.close()
        raise SourceUnreachable(f"{self.host} does not finish the list of what changed")

    def _discovered(self, point: DiskPoint, since: DiskPoint | None) -> "_Cluster":
        spec: dict[str, Any] = {
            "$objectType": "dataprotection.v4.content.ComputeChangedRegionsClusterDiscoverSpec",
            "diskRecoveryPoint": point.reference,
        }
        if since is not None:
            spec["referenceDiskRecoveryPoint"] = since.reference
        wanted = {
            "$objectType": "dataprotection.v4.content.ClusterDiscoverSpec",
            "operation": "COMPUTE_CHANGED_REGIONS",
            "spec": spec,
        }
        path = self.path("dataprotection", f"config/recovery-points/{quoted(point.recovery_point)}/$actions/discover-cluster")
        headers = {"NTNX-Request-Id": str(uuid4())}
        found = dig(self.prism.ask("POST", path, json=wanted, headers=headers, what="find the cluster").json(), "data")
        address = text(found, "clusterIp", "ipv4", "value") or text(found, "clusterIp", "ipv6", "value")
        token = text(found, "jwtToken")
        if not address or not token:
            raise SourceUnreachable(f"{self.host} does not say which cluster has the recovery point")
        # The cluster may have another revision than its Prism Central: the token names it, and no other one is accepted.
        revision = scope_of(token) or self.version("dataprotection")
        return _Cluster(self._element_at(address), f"/api/dataprotection/{revision}/content", token)

    def _asked_regions(self, cluster: "_Cluster", point: DiskPoint, since: DiskPoint | None, start: int) -> Any:
        wanted: dict[str, Any] = {
            "$objectType": "dataprotection.v4.content.VmRecoveryPointChangedRegionsComputeSpec",
            "offset": start,
            "blockSizeByte": BLOCK_BYTES,
        }
        if since is not None:
            wanted["referenceRecoveryPointExtId"] = since.recovery_point
            wanted["referenceVmRecoveryPointExtId"] = since.vm_recovery_point
            wanted["referenceDiskRecoveryPointExtId"] = since.disk_recovery_point
        path = (
            f"{cluster.base}/recovery-points/{quoted(point.recovery_point)}/vm-recovery-points/{quoted(point.vm_recovery_point)}"
            f"/disk-recovery-points/{quoted(point.disk_recovery_point)}/$actions/compute-changed-regions"
        )
        headers = {"cookie": f"NTNX_IGW_SESSION={cluster.token}", "NTNX-Request-Id": str(uuid4())}
        return cluster.prism.ask("POST", path, json=wanted, headers=headers, what="say what changed").json()

    # ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def images(self, name: str) -> list[tuple[str, str, int]]:
        """The images whose names begin with `name`: id, name, size in bytes."""
        found = self.all("vmm", "content/images", "list images", filter=f"startswith(name, '{name}')")
        return [
            (text(one, "extId"), text(one, "name"), number(one.get("sizeBytes")))
            for one in found
            if text(one, "name").startswith(name)
        ]

    def make_image(self, name: str, vm_id: str, disk_id: str, noted: Noted) -> None:
        """Makes an image of a disk. `noted`: see `do`. SnapshotFailed."""
        wanted = {
            "$objectType": "vmm.v4.content.Image",
            "name": name,
            "type": "DISK_IMAGE",
            "source": {"$objectType": "vmm.v4.content.VmDiskSource", "extId": disk_id},
        }
        try:
            self.do("POST", "vmm", "content/images", f"make an image of {vm_id}", json=wanted, noted=noted)
        except Refused as error:
            raise SnapshotFailed(error.detail) from error

    def remove_image(self, image_id: str) -> None:
        self.remove("vmm", f"content/images/{quoted(image_id)}", "remove an image")

    def image_path(self, image_id: str) -> str:
        return self.path("vmm", f"content/images/{quoted(image_id)}/file")


def _task_of(answer: Answer) -> str:
    return text(answer.json() if answer.body else {}, "data", "extId")


def scope_of(token: str) -> str | None:
    """The revision in a token of discover-cluster: its middle part is JSON (RFC 7519)."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)).decode("utf-8", "replace")
    except ValueError:
        return None
    found = _SCOPE.search(claims.replace("\\/", "/"))
    return found[1] if found else None
