"""Prism Central's v4 answers over a State."""

import base64
import json
import re
from typing import Any
from uuid import NAMESPACE_OID, uuid4, uuid5

from tests.fakes.prism.answering import Answer, Answering, ipv4, typed, vm_object
from tests.fakes.prism.state import Group, GroupDisk, Image, Kept, Refusal, State, VmState, regions

REGIONS_MAX = 8
USER_ID = str(uuid4())


class CentralAnswers(Answering):
    """`element_address`: where the cluster is reached. `token_uses`: how often the cluster takes one token."""

    def __init__(self, state: State, version: dict[str, int]) -> None:
        super().__init__(state)
        self.version = version
        self.element_address = "127.0.0.1"
        self.content_version = "v4.0"
        self.token_uses = 1000
        self.tokens: dict[str, int] = {}
        self.negotiates = True
        # Of the one user that there is; by a policy that names it, or its group.
        self.roles, self.by_group = ["Prism Admin"], False

    def answer(
        self, method: str, namespace: str, minor: int, rest: str, query: dict[str, str], headers: dict[str, str], body: Any
    ) -> Answer:
        if minor > self.version.get(namespace, -1):
            raise Refusal(404, f"no {namespace} v4.{minor} here")
        for pattern, name in ROUTES:
            if (found := re.fullmatch(pattern, f"{namespace} {method} {rest}")) is not None:
                if method != "GET" and (earlier := self.state.requests.get(headers.get("ntnx-request-id", ""))) is not None:
                    return self._task(earlier)
                answered: Answer = getattr(self, name)(*found.groups(), query=query, headers=headers, body=body)
                return answered
        raise Refusal(404, f"no path {method} {rest}")

    def info(self, namespace: str) -> Answer:
        if not self.negotiates or namespace not in self.version:
            raise Refusal(404, "no such path")
        return 200, {"data": f"v4.{self.version[namespace]}"}, {}

    # ── VMs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _vm(self, vm: VmState) -> dict[str, Any]:
        boot = (
            vm_object("UefiBoot", isSecureBootEnabled=vm.secure_boot)
            if vm.uefi
            else vm_object(
                "LegacyBoot",
                bootDevice=vm_object("BootDeviceDisk", diskAddress=vm_object("DiskAddress", busType="SCSI", index=0)),
            )
        )
        tools = vm_object(
            "GuestTools",
            isInstalled=vm.tools,
            isEnabled=vm.tools,
            isReachable=vm.tools and vm.power == "ON",
            isVssSnapshotCapable=vm.tools and vm.holds_still,
            guestInfo=vm_object("GuestInfo", guestOsFullName=vm.guest),
        )
        return vm_object(
            "Vm",
            extId=vm.id,
            biosUuid=vm.bios_uuid or None,
            name=vm.name,
            description=vm.description,
            createTime=vm.updated,
            updateTime=vm.updated,
            numSockets=2,
            numCoresPerSocket=1,
            numThreadsPerCore=1,
            memorySizeBytes=1 << 30,
            powerState=vm.power,
            bootConfig=boot,
            machineType="PC",
            vtpmConfig=vm_object("VtpmConfig", isVtpmEnabled=vm.tpm),
            guestTools=tools if vm.tools or vm.guest else None,
            cluster=vm_object("ClusterReference", extId=self.state.cluster_id),
            disks=[self._disk(disk) for disk in vm.disks],
            nics=[
                vm_object(
                    "Nic",
                    extId=vm.disks[0].device if vm.disks else vm.id,
                    backingInfo=vm_object("EmulatedNic", model="VIRTIO", macAddress="50:6b:8d:aa:bb:cc", isConnected=True),
                    networkInfo=vm_object(
                        "NicNetworkInfo",
                        nicType="NORMAL_NIC",
                        subnet=vm_object("SubnetReference", extId=self.state.subnet_id),
                        ipv4Info=vm_object("Ipv4Info", learnedIpAddresses=[ipv4("10.1.2.3")]),
                    ),
                )
            ],
            pcieDevices=[vm_object("PcieDevice", extId=str(uuid4())) for _ in range(vm.passed_through)] or None,
            gpus=[vm_object("Gpu", mode="VIRTUAL", vendor="NVIDIA", name="vGPU") for _ in range(vm.gpus)] or None,
        )

    def _disk(self, disk: Any) -> dict[str, Any]:
        container = self.state.containers[disk.container]["storage_container_uuid"]
        backing = (
            vm_object("ADSFVolumeGroupReference", volumeGroupExtId=disk.group)
            if disk.group
            else vm_object(
                "VmDisk",
                diskExtId=disk.id,
                diskSizeBytes=disk.size,
                storageContainer=vm_object("VmDiskContainerReference", extId=container),
            )
        )
        address = vm_object("DiskAddress", busType=disk.bus, index=disk.index)
        return vm_object("Disk", extId=disk.device, diskAddress=address, backingInfo=backing)

    def vms(self, *, query: dict[str, str], **_: Any) -> Answer:
        """A page's alone are put into words: thousands would take longer than the client that is measured."""
        vms = list(self.state.vms.values())
        page, limit = int(query.get("$page", "0")), int(query.get("$limit", "50"))
        shown = [self._vm(vm) for vm in vms[page * limit : (page + 1) * limit]]
        status, answer, more = self._page("vmm.v4.ahv.config.ListVmsApiResponse", shown, {"$limit": "100"})
        return status, {**answer, "metadata": {"totalAvailableResults": len(vms)}}, more

    def vm(self, id_: str, **_: Any) -> Answer:
        vm = self.state.vm(id_)
        return self._one("vmm.v4.ahv.config.GetVmApiResponse", self._vm(vm), vm.etag)

    def put_vm(self, id_: str, *, headers: dict[str, str], body: Any, **_: Any) -> Answer:
        vm = self.state.vm(id_)
        self._matched(headers, vm.etag)
        vm.description = body.get("description", "")
        vm.touch()
        return self._did("UpdateVm", headers)

    def power(self, id_: str, action: str, *, headers: dict[str, str], **_: Any) -> Answer:
        vm = self.state.vm(id_)
        self._matched(headers, vm.etag)
        if action == "guest-shutdown" and not vm.tools:
            raise Refusal(400, "NGT is not installed")
        if action == "power-on":
            vm.power = "ON"
        elif not (vm.deaf and action != "power-off"):
            vm.power = "OFF"
        vm.touch()
        return self._did(action, headers)

    def images(self, *, query: dict[str, str], **_: Any) -> Answer:
        return self._page(
            "vmm.v4.content.ListImagesApiResponse", [self._image(one) for one in self.state.images.values()], query
        )

    def _image(self, image: Image) -> dict[str, Any]:
        return typed(
            "vmm.v4.content.Image", extId=image.id, name=image.name, type="DISK_IMAGE", sizeBytes=image.path.stat().st_size
        )

    def image(self, id_: str, **_: Any) -> Answer:
        if id_ not in self.state.images:
            raise Refusal(404, f"no image {id_}")
        return self._one("vmm.v4.content.GetImageApiResponse", self._image(self.state.images[id_]), 'W/"1"')

    def make_image(self, *, headers: dict[str, str], body: Any, **_: Any) -> Answer:
        wanted = body["source"]["extId"]
        for vm in self.state.vms.values():
            for disk in vm.disks:
                if disk.device == wanted:
                    image_of(self.state, body["name"], self.state.path(disk).read_bytes())
                    return self._did("CreateImage", headers)
        return self._did("CreateImage", headers, f"no VM disk {wanted}")

    def delete_image(self, id_: str, *, headers: dict[str, str], **_: Any) -> Answer:
        if self.state.images.pop(id_, None) is None:
            raise Refusal(404, f"no image {id_}")
        return self._did("DeleteImage", headers)

    # ── the cluster ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _cluster(self) -> dict[str, Any]:
        service = self.state.data_services
        return typed(
            "clustermgmt.v4.config.Cluster",
            extId=self.state.cluster_id,
            name="cluster",
            config=typed(
                "clustermgmt.v4.config.ClusterConfigReference",
                clusterFunction=["AOS"],
                buildInfo=typed("clustermgmt.v4.config.BuildReference", version="7.0.1"),
            ),
            network=typed(
                "clustermgmt.v4.config.ClusterNetworkReference",
                externalDataServiceIp=typed("common.v1.config.IPAddress", ipv4=ipv4(service)) if service else None,
            ),
        )

    def clusters(self, *, query: dict[str, str], **_: Any) -> Answer:
        config = typed(
            "clustermgmt.v4.config.ClusterConfigReference",
            clusterFunction=["PRISM_CENTRAL"],
            buildInfo=typed("clustermgmt.v4.config.BuildReference", version="pc.2024.3"),
        )
        central = typed("clustermgmt.v4.config.Cluster", extId=str(uuid4()), name="Unnamed", config=config)
        return self._page("clustermgmt.v4.config.ListClustersApiResponse", [central, self._cluster()], query)

    def cluster(self, id_: str, **_: Any) -> Answer:
        if id_ != self.state.cluster_id:
            raise Refusal(404, f"no cluster {id_}")
        return self._one("clustermgmt.v4.config.GetClusterApiResponse", self._cluster())

    def containers(self, *, query: dict[str, str], **_: Any) -> Answer:
        found = [
            typed("clustermgmt.v4.config.StorageContainer", containerExtId=one["storage_container_uuid"], name=name)
            for name, one in self.state.containers.items()
        ]
        return self._page("clustermgmt.v4.config.ListStorageContainersApiResponse", found, query)

    def subnets(self, *, query: dict[str, str], **_: Any) -> Answer:
        found = [typed("networking.v4.config.Subnet", extId=self.state.subnet_id, name="vlan 12")]
        return self._page("networking.v4.config.ListSubnetsApiResponse", found, query)

    # ── who may what ─────────────────────────────────────────────────────────────────────────────────────────────────

    def users(self, *, query: dict[str, str], **_: Any) -> Answer:
        found = [typed("iam.v4.authn.User", extId=USER_ID, username="mover", userType="LOCAL", status="ACTIVE")]
        wanted = query.pop("$filter", "username eq 'mover'")
        return self._page("iam.v4.authn.ListUsersApiResponse", found if wanted == "username eq 'mover'" else [], query)

    def _role_id(self, name: str) -> str:
        return str(uuid5(NAMESPACE_OID, name))

    def policies(self, *, query: dict[str, str], **_: Any) -> Answer:
        mine = {"usergroup": {"uuid": {"anyof": [str(uuid4())]}}} if self.by_group else {"user": {"uuid": {"anyof": [USER_ID]}}}
        another = {"user": {"uuid": {"anyof": [str(uuid4())]}}}
        kind = "iam.v4.authz.AuthorizationPolicy"
        entities = [typed("iam.v4.authz.EntityFilter", entityFilter={"*": {"*": {"eq": "*"}}})]
        found = [
            typed(
                kind,
                extId=str(uuid4()),
                displayName=f"{role}_acp",
                role=self._role_id(role),
                identities=[typed("iam.v4.authz.IdentityFilter", identityFilter=who)],
                entities=entities,
            )
            for role, who in (("Super Admin", another), *((role, mine) for role in self.roles))
        ]
        return self._page("iam.v4.authz.ListAuthorizationPoliciesApiResponse", found, query)

    def authz_roles(self, *, query: dict[str, str], **_: Any) -> Answer:
        names = dict.fromkeys(["Super Admin", "Prism Admin", "Prism Viewer", *self.roles])
        found = [
            typed("iam.v4.authz.Role", extId=self._role_id(name), displayName=name, operations=[str(uuid4())]) for name in names
        ]
        return self._page("iam.v4.authz.ListRolesApiResponse", found, query)

    # ── recovery points ──────────────────────────────────────────────────────────────────────────────────────────────

    def _point(self, kept: Kept) -> dict[str, Any]:
        disks = [
            typed("dataprotection.v4.common.DiskRecoveryPoint", diskRecoveryPointExtId=point, diskExtId=disk)
            for disk, point in kept.disk_points.items()
        ]
        vm = typed("dataprotection.v4.config.VmRecoveryPoint", extId=kept.vm_point, vmExtId=kept.vm, diskRecoveryPoints=disks)
        return typed(
            "dataprotection.v4.config.RecoveryPoint",
            extId=kept.id,
            name=kept.name,
            creationTime=kept.created,
            expirationTime=kept.expires,
            status="COMPLETE",
            recoveryPointType=kept.kind,
            vmRecoveryPoints=[vm],
        )

    def _points(self) -> list[Kept]:
        return [one for one in self.state.kept.values() if isinstance(one.expires, str)]

    def points(self, *, query: dict[str, str], **_: Any) -> Answer:
        return self._page(
            "dataprotection.v4.config.ListRecoveryPointsApiResponse", [self._point(one) for one in self._points()], query
        )

    def make_point(self, *, headers: dict[str, str], body: Any, **_: Any) -> Answer:
        vm = self.state.vm(body["vmRecoveryPoints"][0]["vmExtId"])
        if body["recoveryPointType"] == "APPLICATION_CONSISTENT" and not vm.tools:
            return self._did("CreateRecoveryPoint", headers, "NGT is not installed")
        self.state.keep(vm, body["name"], body["recoveryPointType"], body["expirationTime"])
        return self._did("CreateRecoveryPoint", headers)

    def _kept(self, id_: str) -> Kept:
        kept = self.state.kept.get(id_)
        if kept is None or kept not in self._points():
            raise Refusal(404, f"no recovery point {id_}")
        return kept

    def point(self, id_: str, **_: Any) -> Answer:
        return self._one("dataprotection.v4.config.GetRecoveryPointApiResponse", self._point(self._kept(id_)), 'W/"1"')

    def delete_point(self, id_: str, *, headers: dict[str, str], **_: Any) -> Answer:
        self.state.forget(self._kept(id_))
        return self._did("DeleteRecoveryPoint", headers)

    def discover(self, id_: str, *, body: Any, **_: Any) -> Answer:
        self._kept(id_)
        for name in ("diskRecoveryPoint", "referenceDiskRecoveryPoint"):
            if (wanted := body["spec"].get(name)) is not None:
                self._kept(wanted["recoveryPointExtId"])
        claims = {"scope": f"POST:/api/dataprotection/{self.content_version}/content/recovery-points/{id_}", "n": str(uuid4())}
        middle = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
        token = f"e30.{middle}.c2ln"
        self.tokens[token] = self.token_uses
        info = typed(
            "dataprotection.v4.common.ClusterInfo",
            jwtToken=token,
            clusterIp=typed("common.v1.config.IPAddress", ipv4=ipv4(self.element_address)),
        )
        return self._one("dataprotection.v4.config.ClusterInfoApiResponse", info)

    def content_regions(self, minor: int, rest: str, headers: dict[str, str], body: Any) -> Answer:
        """Of the cluster, which takes the token alone."""
        found = re.fullmatch(
            r"content/recovery-points/([^/]+)/vm-recovery-points/([^/]+)/disk-recovery-points/([^/]+)/\$actions/compute-changed-regions",
            rest,
        )
        if found is None:
            raise Refusal(404, f"no path {rest}")
        if "authorization" in headers:
            raise Refusal(403, "a token is needed")
        token = headers.get("cookie", "").removeprefix("NTNX_IGW_SESSION=")
        if f"v4.{minor}" != self.content_version or self.tokens.get(token, 0) <= 0:
            raise Refusal(401, "the token is not for this path, or is over")
        self.tokens[token] -= 1
        new = self.state.file_of_point(self._kept(found[1]), found[2], found[3])
        old = None
        if "referenceRecoveryPointExtId" in body:
            before = self._kept(body["referenceRecoveryPointExtId"])
            old = self.state.file_of_point(
                before, body["referenceVmRecoveryPointExtId"], body["referenceDiskRecoveryPointExtId"]
            )
        listed, following = regions(new, old, body.get("offset", 0), REGIONS_MAX)
        kind = "dataprotection.v4.content.ChangedRegion"
        extra = [("fileSize", new.stat().st_size), ("nextOffset", following or 0)]
        answer = {
            "$objectType": "dataprotection.v4.content.ChangedVmRegionsApiResponse",
            "data": [
                typed(kind, offset=at, length=length, regionType="ZEROED" if zero else "REGULAR") for at, length, zero in listed
            ],
            "metadata": {"extraInfo": [{"name": name, "value": value} for name, value in extra]},
        }
        return 200, answer, {}

    # ── volume groups ────────────────────────────────────────────────────────────────────────────────────────────────

    def _group(self, id_: str) -> Group:
        if id_ not in self.state.groups:
            raise Refusal(404, f"no volume group {id_}")
        return self.state.groups[id_]

    def _shown_group(self, group: Group) -> dict[str, Any]:
        return typed(
            "volumes.v4.config.VolumeGroup",
            extId=group.id,
            name=group.name,
            clusterReference=group.cluster,
            targetName=group.target,
            sharingStatus="NOT_SHARED",
            usageType=group.usage,
        )

    def groups(self, *, query: dict[str, str], **_: Any) -> Answer:
        found = [self._shown_group(one) for one in self.state.groups.values()]
        return self._page("volumes.v4.config.ListVolumeGroupsApiResponse", found, query)

    def group(self, id_: str, **_: Any) -> Answer:
        return self._one("volumes.v4.config.GetVolumeGroupApiResponse", self._shown_group(self._group(id_)), 'W/"1"')

    def make_group(self, *, headers: dict[str, str], body: Any, **_: Any) -> Answer:
        group = Group(str(uuid4()), body["name"], body["clusterReference"], usage=body.get("usageType", "USER"))
        self.state.groups[group.id] = group
        self.state.on_group("made", group)
        return self._did("CreateVolumeGroup", headers)

    def delete_group(self, id_: str, *, headers: dict[str, str], **_: Any) -> Answer:
        group = self._group(id_)
        if group.clients:
            raise Refusal(409, "iSCSI clients are attached")
        del self.state.groups[id_]
        self.state.on_group("gone", group)
        return self._did("DeleteVolumeGroup", headers)

    def disks(self, id_: str, *, query: dict[str, str], **_: Any) -> Answer:
        found = [
            typed(
                "volumes.v4.config.VolumeDisk",
                extId=one.id,
                index=one.index,
                description=one.description,
                diskSizeBytes=one.size,
            )
            for one in self._group(id_).disks
        ]
        return self._page("volumes.v4.config.ListVolumeDisksApiResponse", found, query)

    def make_disk(self, id_: str, *, headers: dict[str, str], body: Any, **_: Any) -> Answer:
        group, source = self._group(id_), body["diskDataSourceReference"]
        if source["entityType"] != "DISK_RECOVERY_POINT":
            raise Refusal(400, "only recovery points are cloned here")
        for kept in self._points():
            for disk, point in kept.disk_points.items():
                if point == source["extId"]:
                    path = self.state.folder / kept.files[disk][1:]
                    one = GroupDisk(str(uuid4()), body["index"], body["description"], point, path.stat().st_size, path)
                    group.disks.append(one)
                    self.state.on_group("disk", group)
                    return self._did("CreateVolumeDisk", headers)
        return self._did("CreateVolumeDisk", headers, f"no disk recovery point {source['extId']}")

    def attach(self, id_: str, *, headers: dict[str, str], body: Any, **_: Any) -> Answer:
        group = self._group(id_)
        group.clients[str(uuid4())] = body["iscsiInitiatorName"]
        self.state.on_group("clients", group)
        return self._did("AttachIscsiClient", headers)

    def detach(self, id_: str, *, headers: dict[str, str], body: Any, **_: Any) -> Answer:
        group = self._group(id_)
        group.clients.pop(body["extId"], None)
        self.state.on_group("clients", group)
        return self._did("DetachIscsiClient", headers)

    def attachments(self, id_: str, *, query: dict[str, str], **_: Any) -> Answer:
        group = self._group(id_)
        found = [
            typed("volumes.v4.config.IscsiClientAttachment", extId=client, clusterReference=group.cluster)
            for client in group.clients
        ]
        return self._page("volumes.v4.config.ListExternalIscsiAttachmentsApiResponse", found, query)


def image_of(state: State, name: str, content: bytes) -> Image:
    id_ = str(uuid4())
    path = state.folder / f".image-{id_}"
    path.write_bytes(content)
    state.images[id_] = Image(id_, name, path)
    return state.images[id_]


_ID = "([^/]+)"
ROUTES = [
    ("iam GET authn/users", "users"),
    ("iam GET authz/authorization-policies", "policies"),
    ("iam GET authz/roles", "authz_roles"),
    ("vmm GET ahv/config/vms", "vms"),
    (f"vmm GET ahv/config/vms/{_ID}", "vm"),
    (f"vmm PUT ahv/config/vms/{_ID}", "put_vm"),
    (rf"vmm POST ahv/config/vms/{_ID}/\$actions/(power-on|power-off|shutdown|guest-shutdown)", "power"),
    ("vmm GET content/images", "images"),
    ("vmm POST content/images", "make_image"),
    (f"vmm GET content/images/{_ID}", "image"),
    (f"vmm DELETE content/images/{_ID}", "delete_image"),
    ("prism GET config/tasks", "list_tasks"),
    (f"prism GET config/tasks/{_ID}", "task"),
    ("clustermgmt GET config/clusters", "clusters"),
    (f"clustermgmt GET config/clusters/{_ID}", "cluster"),
    ("clustermgmt GET config/storage-containers", "containers"),
    ("networking GET config/subnets", "subnets"),
    ("dataprotection GET config/recovery-points", "points"),
    ("dataprotection POST config/recovery-points", "make_point"),
    (f"dataprotection GET config/recovery-points/{_ID}", "point"),
    (f"dataprotection DELETE config/recovery-points/{_ID}", "delete_point"),
    (rf"dataprotection POST config/recovery-points/{_ID}/\$actions/discover-cluster", "discover"),
    ("volumes GET config/volume-groups", "groups"),
    ("volumes POST config/volume-groups", "make_group"),
    (f"volumes GET config/volume-groups/{_ID}", "group"),
    (f"volumes DELETE config/volume-groups/{_ID}", "delete_group"),
    (f"volumes GET config/volume-groups/{_ID}/disks", "disks"),
    (f"volumes POST config/volume-groups/{_ID}/disks", "make_disk"),
    (rf"volumes POST config/volume-groups/{_ID}/\$actions/attach-iscsi-client", "attach"),
    (rf"volumes POST config/volume-groups/{_ID}/\$actions/detach-iscsi-client", "detach"),
    (f"volumes GET config/volume-groups/{_ID}/external-iscsi-attachments", "attachments"),
]
