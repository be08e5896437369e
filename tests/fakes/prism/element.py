"""Prism Element's v3 and v2 answers over a State."""

import re
from typing import Any
from uuid import uuid4

from tests.fakes.prism.answering import Answer
from tests.fakes.prism.central import image_of
from tests.fakes.prism.state import DiskState, Kept, Refusal, State, VmState, regions

REGIONS_MAX = 8
MIB = 1 << 20


class ElementAnswers:
    def __init__(self, state: State) -> None:
        self.state = state
        # As clusters do that Prism Central manages.
        self.refuses_put = False

    def answer(self, method: str, path: str, body: Any) -> Answer:
        for pattern, name in ROUTES:
            if (found := re.fullmatch(pattern, f"{method} {path}")) is not None:
                status, answer = getattr(self, name)(*found.groups(), body=body)
                return status, answer, {}
        raise Refusal(404, f"no path {method} {path}")

    # ── VMs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _vm(self, vm: VmState) -> dict[str, Any]:
        resources: dict[str, Any] = {
            "num_sockets": 2,
            "num_vcpus_per_socket": 1,
            "num_threads_per_core": 1,
            "memory_size_mib": 1024,
            "power_state": vm.power,
            "hypervisor_type": "AHV",
            "boot_config": {"boot_type": "SECURE_BOOT" if vm.secure_boot else "UEFI"} if vm.uefi else {"boot_type": "LEGACY"},
            "vtpm_config": {"vtpm_enabled": vm.tpm},
            "disk_list": [self._disk(disk) for disk in vm.disks],
            "nic_list": [
                {
                    "uuid": vm.id,
                    "nic_type": "NORMAL_NIC",
                    "mac_address": "50:6b:8d:aa:bb:cc",
                    "is_connected": True,
                    "ip_endpoint_list": [{"type": "ASSIGNED", "ip": "10.1.2.3"}],
                    "subnet_reference": {"kind": "subnet", "name": "vlan 12", "uuid": self.state.subnet_id},
                }
            ],
            "gpu_list": [{"mode": "VIRTUAL", "name": "vGPU"} for _ in range(vm.gpus)],
        }
        if vm.bios_uuid:
            resources["bios_uuid"] = vm.bios_uuid
        if vm.tools:
            tools = {"state": "ENABLED", "vss_snapshot_capable": vm.holds_still, "is_reachable": vm.power == "ON"}
            resources["guest_tools"] = {"nutanix_guest_tools": {**tools, "guest_os_version": vm.guest}}
        cluster = {"kind": "cluster", "name": "cluster", "uuid": self.state.cluster_id}
        shared = {"name": vm.name, "description": vm.description, "cluster_reference": cluster}
        return {
            "metadata": {"kind": "vm", "uuid": vm.id, "spec_version": vm.version, "last_update_time": vm.updated},
            "spec": {**shared, "resources": {"power_state": vm.power, "nic_list": []}},
            "status": {**shared, "state": "COMPLETE", "resources": resources},
        }

    def _disk(self, disk: DiskState) -> dict[str, Any]:
        container = self.state.containers[disk.container]
        found = {
            "uuid": disk.device,
            "disk_size_bytes": disk.size,
            "disk_size_mib": -(-disk.size // MIB),
            "device_properties": {
                "device_type": "DISK",
                "disk_address": {"adapter_type": disk.bus, "device_index": disk.index},
            },
            "storage_config": {
                "storage_container_reference": {
                    "kind": "storage_container",
                    "uuid": container["storage_container_uuid"],
                    "name": container["name"],
                }
            },
        }
        if disk.group:
            found["volume_group_reference"] = {"kind": "volume_group", "uuid": disk.group}
        return found

    def vms(self, *, body: Any) -> tuple[int, Any]:
        page = self._page(body, list(self.state.vms.values()), "vm")
        return 200, {"api_version": "3.1", **page, "entities": [self._vm(vm) for vm in page["entities"]]}

    def _page(self, body: Any, entities: list[Any], kind: str) -> dict[str, Any]:
        offset, length = body.get("offset", 0), min(body.get("length", 20), 500)
        page = entities[offset : offset + length]
        reported = {"kind": kind, "total_matches": len(entities), "offset": offset, "length": len(page)}
        return {"metadata": reported, "entities": page}

    def vm(self, id_: str, *, body: Any) -> tuple[int, Any]:
        return 200, {"api_version": "3.1", **self._vm(self.state.vm(id_))}

    def put_vm(self, id_: str, *, body: Any) -> tuple[int, Any]:
        if self.refuses_put:
            raise Refusal(405, "REQUEST_NOT_SUPPORTED")
        vm = self.state.vm(id_)
        if body["metadata"]["spec_version"] != vm.version:
            raise Refusal(412, "the spec_version is outdated")
        vm.description = body["spec"].get("description", "")
        vm.touch()
        return 202, {"api_version": "3.1", **self._vm(vm)}

    def counted(self, id_: str, *, body: Any) -> tuple[int, Any]:
        vm = self.state.vm(id_)
        return 200, {"uuid": vm.id, "name": vm.name, "power_state": vm.power.lower(), "vm_logical_timestamp": vm.version}

    def power(self, id_: str, *, body: Any) -> tuple[int, Any]:
        vm = self.state.vm(id_)
        if body["transition"] == "ON":
            vm.power = "ON"
        elif not (vm.deaf and body["transition"] != "OFF"):
            vm.power = "OFF"
        vm.touch()
        return 201, {"task_uuid": self.state.task("power")}

    # ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _shown(self, kept: Kept) -> dict[str, Any]:
        vm = self.state.vms.get(kept.vm)
        files = [
            {"file_path": f"/{path.split('/')[1]}/.acropolis/vmdisk/{disk}", "snapshot_file_path": path}
            for disk, path in kept.files.items()
        ]
        # The file in the drive of the installer's CD comes along.
        files.append(
            {"file_path": f"/default/.acropolis/vmdisk/{kept.vm_point}", "snapshot_file_path": "/default/.snapshot/cd"}
        )
        return {
            "api_version": "3.1",
            "metadata": {"kind": "vm_snapshot", "uuid": kept.id},
            "status": {
                "state": "COMPLETE",
                "name": kept.name,
                "snapshot_type": kept.kind,
                "expiration_time_msecs": kept.expires,
                "resources": {"entity_uuid": kept.vm},
                "snapshot_file_list": files if vm is not None else [],
            },
        }

    def _snapshots(self) -> list[Kept]:
        return [one for one in self.state.kept.values() if isinstance(one.expires, int)]

    def snapshots(self, *, body: Any) -> tuple[int, Any]:
        return 200, {"api_version": "3.1", **self._page(body, [self._shown(one) for one in self._snapshots()], "vm_snapshot")}

    def make_snapshot(self, *, body: Any) -> tuple[int, Any]:
        spec = body["spec"]
        vm = self.state.vm(spec["resources"]["entity_uuid"])
        if spec.get("snapshot_type") == "APPLICATION_CONSISTENT" and not vm.tools:
            raise Refusal(422, "NGT is not installed")
        kept = self.state.keep(vm, spec["name"], spec.get("snapshot_type", "CRASH_CONSISTENT"), spec["expiration_time_msecs"])
        made = {"kind": "vm_snapshot", "uuid": kept.id}
        return 202, {"api_version": "3.1", "metadata": made, "status": {"state": "PENDING", "name": kept.name}}

    def _kept(self, id_: str) -> Kept:
        kept = self.state.kept.get(id_)
        if kept is None or kept not in self._snapshots():
            raise Refusal(404, f"no vm_snapshot {id_}")
        return kept

    def snapshot(self, id_: str, *, body: Any) -> tuple[int, Any]:
        return 200, self._shown(self._kept(id_))

    def delete_snapshot(self, id_: str, *, body: Any) -> tuple[int, Any]:
        self.state.forget(self._kept(id_))
        return 200, {}

    def changed(self, *, body: Any) -> tuple[int, Any]:
        new = self.state.file(body["snapshot_file_path"])
        old = self.state.file(body["reference_snapshot_file_path"]) if "reference_snapshot_file_path" in body else None
        found, following = regions(new, old, body.get("start_offset", 0), REGIONS_MAX)
        listed = [{"offset": at, "length": length, "type": "ZEROED" if zero else "REGULAR"} for at, length, zero in found]
        answer: dict[str, Any] = {"file_size": new.stat().st_size, "region_list": listed}
        return 200, answer if following is None else {**answer, "next_offset": following}

    def virtual_disk(self, id_: str, *, body: Any) -> tuple[int, Any]:
        for vm in self.state.vms.values():
            for disk in vm.disks:
                if disk.id == id_:
                    address = f"{disk.bus.lower()}.{disk.index}"
                    return 200, {
                        "uuid": disk.id,
                        "device_uuid": disk.device,
                        "disk_address": address,
                        "attached_vm_uuid": vm.id,
                        "attached_vmname": vm.name,
                        "disk_capacity_in_bytes": disk.size,
                    }
        raise Refusal(500, f"no virtual disk {id_} is attached")

    # ── containers, images ───────────────────────────────────────────────────────────────────────────────────────────

    def containers(self, *, body: Any) -> tuple[int, Any]:
        return 200, {"metadata": {}, "entities": list(self.state.containers.values())}

    def put_container(self, *, body: Any) -> tuple[int, Any]:
        if body["name"] not in self.state.containers:
            raise Refusal(404, f"no container {body['name']}")
        self.state.containers[body["name"]] = body
        self.state.on_list()
        return 200, {"value": True}

    def cluster(self, *, body: Any) -> tuple[int, Any]:
        return 200, {
            "uuid": self.state.cluster_id,
            "name": "cluster",
            "version": "6.10",
            "nfs_subnet_whitelist": self.state.cluster_list,
        }

    def images(self, *, body: Any) -> tuple[int, Any]:
        found = [
            {
                "metadata": {"kind": "image", "uuid": one.id},
                "status": {
                    "state": "COMPLETE",
                    "name": one.name,
                    "resources": {"image_type": "DISK_IMAGE", "size_bytes": one.path.stat().st_size},
                },
            }
            for one in self.state.images.values()
        ]
        return 200, {"api_version": "3.1", **self._page(body, found, "image")}

    def make_image(self, *, body: Any) -> tuple[int, Any]:
        wanted = body["spec"]["resources"]["data_source_reference"]["uuid"]
        failure: str | None = f"no VM disk {wanted}"
        made = str(uuid4())
        for vm in self.state.vms.values():
            for disk in vm.disks:
                if disk.device == wanted:
                    made, failure = image_of(self.state, body["spec"]["name"], self.state.path(disk).read_bytes()).id, None
        status = {
            "state": "PENDING",
            "name": body["spec"]["name"],
            "resources": {},
            "execution_context": {"task_uuid": self.state.task("image", failure)},
        }
        return 202, {"api_version": "3.1", "metadata": {"kind": "image", "uuid": made}, "status": status}

    def delete_image(self, id_: str, *, body: Any) -> tuple[int, Any]:
        if self.state.images.pop(id_, None) is None:
            raise Refusal(404, f"no image {id_}")
        return 202, {}

    def task(self, id_: str, *, body: Any) -> tuple[int, Any]:
        if id_ not in self.state.tasks:
            raise Refusal(404, f"no task {id_}")
        task = self.state.tasks[id_]
        task["looks"] += 1
        status = ("FAILED" if task["failure"] else "SUCCEEDED") if task["looks"] > 1 else "RUNNING"
        return 200, {"uuid": id_, "status": status, **({"error_detail": task["failure"]} if task["failure"] else {})}


_ID = "([^/]+)"
_V3, _V2 = "/api/nutanix/v3", "/api/nutanix/v2.0"
ROUTES = [
    (f"POST {_V3}/vms/list", "vms"),
    (f"GET {_V3}/vms/{_ID}", "vm"),
    (f"PUT {_V3}/vms/{_ID}", "put_vm"),
    (f"GET {_V2}/vms/{_ID}", "counted"),
    (f"POST {_V2}/vms/{_ID}/set_power_state", "power"),
    (f"POST {_V3}/vm_snapshots/list", "snapshots"),
    (f"POST {_V3}/vm_snapshots", "make_snapshot"),
    (f"GET {_V3}/vm_snapshots/{_ID}", "snapshot"),
    (f"DELETE {_V3}/vm_snapshots/{_ID}", "delete_snapshot"),
    (f"POST {_V3}/data/changed_regions", "changed"),
    (f"GET {_V2}/virtual_disks/{_ID}", "virtual_disk"),
    (f"GET {_V2}/storage_containers", "containers"),
    (f"PUT {_V2}/storage_containers", "put_container"),
    (f"GET {_V2}/cluster", "cluster"),
    (f"POST {_V3}/images/list", "images"),
    (f"POST {_V3}/images", "make_image"),
    (f"DELETE {_V3}/images/{_ID}", "delete_image"),
    (f"GET {_V3}/tasks/{_ID}", "task"),
]
