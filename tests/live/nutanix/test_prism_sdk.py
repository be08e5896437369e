"""The vendor's own SDK drives the same stand-in: a second client, which nobody here wrote, finds what it expects.

It lives in an environment of its own (its pins never enter ours), made by whoever comes first and kept outside the repository.
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.prism.server import PASSWORD, USER, Prisms

pytestmark = pytest.mark.timeout(600)

WHEELS = json.loads((Path(__file__).parents[2] / "fakes" / "prism" / "v4.json").read_text())["about"]["wheels"]
NEEDED = ("ntnx-vmm-py-client", "ntnx-dataprotection-py-client", "ntnx-prism-py-client", "ntnx-volumes-py-client")
PINS = [f"{name}=={WHEELS[name]}" for name in NEEDED]
MADE_WITHIN_S = 500

SCRIPT = """
import importlib, json, sys, time
order = json.load(sys.stdin)

def client(namespace):
    package = importlib.import_module(f"ntnx_{namespace}_py_client")
    chosen = package.Configuration()
    chosen.host, chosen.port, chosen.username, chosen.password = "127.0.0.1", order["port"], order["user"], order["password"]
    chosen.verify_ssl, chosen.max_retry_attempts = False, 1
    return package, package.ApiClient(configuration=chosen)

def ended(answer):
    while True:
        task = prism.TasksApi(prism_client).get_task_by_id(answer.data.ext_id).data
        if task.status in ("SUCCEEDED", "FAILED"):
            return task.status
        time.sleep(0.05)

vmm, vmm_client = client("vmm")
prism, prism_client = client("prism")
points, points_client = client("dataprotection")
groups, groups_client = client("volumes")
seen = {"version": None}

vms = vmm.VmApi(vmm_client)
listed = vms.list_vms(_page=0, _limit=50)
seen["version"] = vmm_client.get_negotiated_version()
seen["names"] = [one.name for one in listed.data]
vm = vms.get_vm_by_id(listed.data[0].ext_id)
seen["disks"] = [[one.disk_address.bus_type, one.backing_info.disk_size_bytes] for one in vm.data.disks]
seen["boot"] = type(vm.data.boot_config).__name__
etag = vmm.ApiClient.get_etag(vm)
seen["off"] = ended(vms.power_off_vm(vm.data.ext_id, if_match=etag))
seen["power"] = vms.get_vm_by_id(vm.data.ext_id).data.power_state

api = points.RecoveryPointsApi(points_client)
config = points.models.dataprotection.v4.config
wanted = config.RecoveryPoint.RecoveryPoint(
    name="by the SDK",
    recovery_point_type="CRASH_CONSISTENT",
    expiration_time="2030-01-01T00:00:00Z",
    vm_recovery_points=[config.VmRecoveryPoint.VmRecoveryPoint(vm_ext_id=vm.data.ext_id)],
)
seen["point"] = ended(api.create_recovery_point(wanted))
made = api.list_recovery_points(_filter="name eq 'by the SDK'").data[0]
held = made.vm_recovery_points[0]
seen["held"] = len(held.disk_recovery_points)
disk = held.disk_recovery_points[0]
content = points.models.dataprotection.v4.content
reference = content.VmDiskRecoveryPointReference.VmDiskRecoveryPointReference(
    recovery_point_ext_id=made.ext_id,
    vm_recovery_point_ext_id=held.ext_id,
    disk_recovery_point_ext_id=disk.disk_recovery_point_ext_id,
)
spec = content.ClusterDiscoverSpec.ClusterDiscoverSpec(
    operation="COMPUTE_CHANGED_REGIONS",
    spec=content.ComputeChangedRegionsClusterDiscoverSpec.ComputeChangedRegionsClusterDiscoverSpec(disk_recovery_point=reference),
)
seen["token"] = len(api.discover_cluster_for_recovery_point_id(made.ext_id, spec).data.jwt_token) > 20 if hasattr(
    api, "discover_cluster_for_recovery_point_id") else len(api.discover_cluster(made.ext_id, spec).data.jwt_token) > 20

volumes = groups.VolumeGroupsApi(groups_client)
group = groups.models.volumes.v4.config.VolumeGroup.VolumeGroup(
    name="sdk", cluster_reference=vm.data.cluster.ext_id, sharing_status="NOT_SHARED"
)
seen["group"] = ended(volumes.create_volume_group(group))
group_id = volumes.list_volume_groups(_filter="name eq 'sdk'").data[0].ext_id
seen["target"] = volumes.get_volume_group_by_id(group_id).data.target_name.startswith("sdk-")
seen["gone"] = [ended(volumes.delete_volume_group_by_id(group_id)), ended(api.delete_recovery_point_by_id(made.ext_id))]
json.dump(seen, sys.stdout)
"""


@pytest.fixture(scope="module")
def sdk() -> Path:
    """Its Python. One makes it, the others wait."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "synvirt-tests"
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / f"ntnx-sdk-{hashlib.sha256(' '.join(PINS).encode()).hexdigest()[:16]}"
    with (cache / "ntnx-sdk.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "whole").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(made)], check=True, timeout=MADE_WITHIN_S)
            pip = [str(made / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", *PINS]
            subprocess.run(pip, check=True, timeout=MADE_WITHIN_S, capture_output=True)
            (made / "whole").touch()
    return made / "bin" / "python"


def test_the_vendors_sdk_drives_the_stand_in(sdk: Path, cluster: Prisms) -> None:
    """Both directions are held against the schema as well (`cluster`); what the SDK asks beyond ours is no mistake of ours."""
    # The SDK negotiates with servers from v4.2 on alone.
    cluster.central.version = {"vmm": 2, "dataprotection": 2, "prism": 2, "clustermgmt": 2, "volumes": 2, "networking": 2}
    cluster.state.add_vm("web", {"scsi.0": bytes(1 << 20), "scsi.1": bytes(1 << 16)})
    order = json.dumps({"port": cluster.ports["central"], "user": USER, "password": PASSWORD})
    done = subprocess.run([str(sdk), "-W", "ignore", "-c", SCRIPT], input=order, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout[done.stdout.index("{") :]) == {
        "version": "v4.2",
        "names": ["web"],
        "disks": [["SCSI", 1 << 20], ["SCSI", 1 << 16]],
        "boot": "LegacyBoot",
        "off": "SUCCEEDED",
        "power": "OFF",
        "point": "SUCCEEDED",
        "held": 2,
        "token": True,
        "group": "SUCCEEDED",
        "target": True,
        "gone": ["SUCCEEDED", "SUCCEEDED"],
    }
    assert cluster.names() == []
