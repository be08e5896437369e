"""Our reading of what real Prism Centrals answered: v4 as ManageIQ recorded it, v3 as the vendor's own client did."""

import json
from pathlib import Path
from typing import Any

import pytest

from synvirt.live import SourceAccess, VmRow
from synvirt.live.nutanix.adapter import PrismApi
from synvirt.live.nutanix.central import Central
from synvirt.live.nutanix.machines import manifest, of_element
from synvirt.live.nutanix.making import Making
from synvirt.live.nutanix.prism import Prism, Where, number, words_of
from synvirt.live.nutanix.volumes import Volumes
from synvirt.live.nutanix.ways import Way
from synvirt.model.machine import VmManifest
from synvirt.transport import Answer, Trust
from tests.contracts.live import in_session
from tests.fakes.prism import schema
from tests.servers.replay import replayed

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "recorded" / "prism.json").read_text())
VM_ID = RECORDED["vm"]["extId"]
CLUSTER_ID = RECORDED["cluster"]["extId"]


def listed(kind: str, entities: list[Any]) -> dict[str, Any]:
    return {"data": entities, "$objectType": kind, "metadata": {**RECORDED["metadata"], "totalAvailableResults": len(entities)}}


def recording() -> str:
    """In the form of docs/recordings.md. The answers had no question's page in them: any page is answered so."""
    vms, clusters = "/api/vmm/v4.0/ahv/config/vms", "/api/clustermgmt/v4.0/config"
    answers = {
        vms: listed("vmm.v4.ahv.config.ListVmsApiResponse", [RECORDED["vm"]]),
        f"{vms}/{VM_ID}": {"data": RECORDED["vm"]},
        f"{clusters}/clusters": listed("clustermgmt.v4.config.ListClustersApiResponse", [RECORDED["cluster"]]),
        f"{clusters}/clusters/{CLUSTER_ID}": {"data": RECORDED["cluster"]},
        f"{clusters}/storage-containers": listed(
            "clustermgmt.v4.config.ListStorageContainersApiResponse", RECORDED["containers"]
        ),
        "/api/networking/v4.0/config/subnets": listed("networking.v4.config.ListSubnetsApiResponse", []),
    }
    lines = [{"recording": 1, "kind": "prism_api", "product": "Nutanix Prism Central", "version": "pc.2024.3.1.1"}]
    for path, body in answers.items():
        for query in ({}, {"$page": "0", "$limit": "1"}, {"$page": "0", "$limit": "100"}):
            request = {"method": "GET", "path": path, "query": query}
            lines.append({"request": request, "answer": {"status": 200, "type": "application/json", "body": body}})
    return "\n".join(json.dumps(line) for line in lines)


def test_a_real_prism_centrals_vm_is_read(tmp_path: Path) -> None:
    async def use(adapter: PrismApi) -> tuple[list[VmRow], VmManifest, str]:
        return await adapter.list_vms(), await adapter.inspect(VM_ID), await adapter.last_start(VM_ID)

    with replayed(recording(), tmp_path) as (endpoint, fingerprint, _):
        options = {"fingerprint_sha256": fingerprint}
        access = SourceAccess(endpoint, {"user": "any", "password": "any"}, options)
        (row,), found, start = in_session(lambda: PrismApi(access), use)
        # Its cluster has a data services address, by which recovery points would be read.
        central = Central(Prism(Where(endpoint, Trust(False, fingerprint))), lambda _: pytest.fail("nobody asks it"))
        form = PrismApi(access)._options
        assert Volumes(central, form, Making(Path("/nonexistent"))).portal(CLUSTER_ID) == "192.168.1.149:3260"
        central.prism.close()
    assert (row.name, row.power_state, row.cpu_count, row.memory_bytes) == ("PC-NameOption-1", "on", 4, 19327352832)
    assert (found.firmware, found.secure_boot, found.tpm, found.uuid) == ("bios", False, False, VM_ID)
    # All but the first of a list come without their type; the CD-ROM's file is no disk.
    assert [(disk.key, disk.capacity_bytes) for disk in found.disks] == [
        ("scsi.0", 15728640),
        ("scsi.1", 75161927680),
        ("scsi.6", 32212254720),
    ]
    assert found.disks[0].source_path == "default-container-68181097865302/01bdc02a-488b-4181-97b0-f550f60b964e"
    nic = found.nics[0]
    assert (nic.mac, nic.ip_addresses, nic.connected) == ("50:6b:8d:c3:f1:67", ("192.168.1.150",), True)
    assert nic.network == "38639cab-28c8-415a-8008-269e69307b60"
    assert start == "2025-05-26T13:54:24.372435Z 9ca5ef81-f2d1-4806-a6f1-2430211a5e55"
    assert {one.id for one in found.concerns} == {"nutanix.read_by", "nutanix.guest_tools", "media-left-out"}
    assert "a disc at ide.0" in next(one.assessment for one in found.concerns if one.id == "media-left-out")


def test_a_real_v3_vm_is_read() -> None:
    found = manifest(of_element(RECORDED["v3 vm"]), Way("nfs"))
    assert (found.name, found.power_state, found.firmware, found.memory_bytes) == ("test-vm", "off", "uefi", 1 << 30)
    assert [(disk.key, disk.capacity_bytes) for disk in found.disks] == [("scsi.0", 8589934592)]
    assert found.disks[0].source_path == "SelfServiceContainer/537e0352-0af0-4aa5-af01-28e5964c5e80"
    nic = found.nics[0]
    assert (nic.mac, nic.network, nic.ip_addresses) == ("50:6b:8d:24:19:54", "vlan173", ("10.23.129.96",))


def test_a_real_refusals_words_are_reported() -> None:
    answer = Answer(404, {"content-type": "application/json"}, json.dumps(RECORDED["v3 refusal"]).encode())
    assert words_of(answer) == "image : c4f95410-57e2-4327-a030-d553743b77ab does not exist.; INVALID_ARGUMENT"


def test_what_was_recorded_has_the_schema_that_our_stand_in_is_held_to() -> None:
    schema.check("v4.json", "vmm.v4.ahv.config.Vm", RECORDED["vm"], "vm")
    schema.check("v4.json", "clustermgmt.v4.config.Cluster", RECORDED["cluster"], "cluster")
    schema.check("v3.json", "VmIntentResponse", RECORDED["v3 vm"], "v3 vm")
    for one in RECORDED["containers"]:
        schema.check("v4.json", "clustermgmt.v4.config.StorageContainer", one, "container")


@pytest.mark.parametrize("written", ["Infinity", "-Infinity", "1e999", "NaN", '"many"', "null", "[]"])
def test_what_is_no_number_counts_as_none(written: str) -> None:
    assert number(json.loads(written)) == 0
