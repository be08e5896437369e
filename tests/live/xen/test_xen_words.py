"""What a pool says of a VM, answer by answer: whose a snapshot is, whether a VM was started since, and whether it came on."""

from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import Internal
from synvirt.live.xen import power, snapshots


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
