"""What a pool says of a VM, answer by answer: whose a snapshot is, whether a VM was started since, and whether it came on."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import CbtReset, Internal, SnapshotFailed
from synvirt.live.xen import exports, power, snapshots


class Pool:
    """Gives the answer to each method, by its first parameter where there are several."""

    host = "pool"

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def call(self, _what: str, method: str, *parameters: Any) -> Any:
        found = self.answers[method.replace(".", "_")]
        return found[parameters[0]] if isinstance(found, dict) and parameters[0] in found else found

    def asked(self, method: str, *parameters: Any) -> Any:
        return self.call("", method, *parameters)

    def awaited(self, _what: str, _method: str, *_: Any, timeout_s: float) -> None:
        assert timeout_s


def test_a_snapshot_of_that_name_is_ours_only_where_it_is_of_the_vm() -> None:
    records = {
        "a vm": {"is_a_snapshot": False, "snapshot_of": "OpaqueRef:NULL"},
        "another's": {"is_a_snapshot": True, "snapshot_of": "another"},
        "its own": {"is_a_snapshot": True, "snapshot_of": "it"},
    }
    vm: Any = SimpleNamespace(reference="it")
    for references, found in ((list(records), "its own"), (["a vm", "another's"], None)):
        pool: Any = Pool(VM_get_by_name_label=references, VM_get_record=records)
        assert snapshots._snapshot_of(pool, vm, "synvirt-job-1") == found


def test_a_start_and_a_revert_are_seen() -> None:
    def last(start: str, generation: str) -> str:
        record = {"metrics": "m", "generation_id": generation}
        pool: Any = Pool(VM_get_by_uuid="it", VM_get_record=record, VM_metrics_get_record={"start_time": start})
        return power.last_start(pool, "00000000-0000-0000-0000-000000000001")

    assert last("monday", "1") == last("monday", "1")
    assert len({last("monday", "1"), last("tuesday", "1"), last("monday", "2")}) == 3


def test_a_vm_that_says_that_it_is_still_off_is_not_taken_for_started() -> None:
    pool: Any = Pool(VM_get_by_uuid="it", VM_get_power_state="Halted")
    with pytest.raises(Internal, match="says that it is Halted"):
        power.power_on(pool, "00000000-0000-0000-0000-000000000001")


# The VDI of a pass's snapshot, which is compared with an older one.
NOW = {
    "is_a_snapshot": True,
    "uuid": "u-now",
    "snapshot_of": "disk",
    "virtual_size": "1048576",
    "cbt_enabled": True,
    "type": "user",
}


@pytest.mark.parametrize(
    ("older", "now", "read", "listed"),
    [
        ({}, {}, True, True),
        ({"snapshot_of": "another"}, {}, False, False),
        ({"snapshot_of": "OpaqueRef:NULL"}, {"snapshot_of": "OpaqueRef:NULL"}, False, False),  # their disks are gone
        ({"snapshot_of": ""}, {"snapshot_of": ""}, False, False),
        ({"type": "cbt_metadata"}, {}, False, True),  # its data was freed: it tells what changed, and has no bytes
        ({"virtual_size": "2097152"}, {}, False, True),
        ({"cbt_enabled": False}, {}, True, False),
        ({}, {"cbt_enabled": False}, True, False),
    ],
)
def test_an_older_snapshot_is_compared_with_only_where_it_is_of_the_same_disk_and_has_what_is_asked(
    older: dict[str, Any], now: dict[str, Any], *, read: bool, listed: bool
) -> None:
    pool: Any = Pool(VDI_get_by_uuid="old", VDI_get_record=NOW | older, VDI_list_changed_blocks="AAA=")
    uses = (
        (read, lambda: exports.base_of(pool, "u-old", NOW | now, "scsi.0")),
        (listed, lambda: exports.changed(pool, "u-old", "now", NOW | now, "scsi.0")),
    )
    for allowed, use in uses:
        with nullcontext() if allowed else pytest.raises(CbtReset):
            use()


def test_a_disk_is_read_from_the_data_of_its_own_snapshot() -> None:
    records = {
        "another's": NOW | {"snapshot_of": "another"},
        "freed": NOW | {"type": "cbt_metadata"},
        "its own": NOW,
    }
    vm: Any = SimpleNamespace(vdis={"scsi.0": "disk"}, record={"name_label": "web"})

    def found(*references: str) -> str:
        pool: Any = Pool(VDI_get_by_name_label=references, VDI_get_record=records)
        return snapshots.disk_in(pool, vm, "synvirt-job-1", "scsi.0")[0]

    assert found(*records) == "its own"
    with pytest.raises(SnapshotFailed, match="has no disk"):
        found("another's", "freed")
