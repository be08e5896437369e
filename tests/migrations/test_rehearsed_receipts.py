"""The result of a job's last rehearsal in its receipt: a file of its own, signed like the plan."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.migrations.proof.receipts import last_result
from synvirt.model.rehearsal import CheckResult, Rehearsal, RehearsalState
from synvirt.model.values import now
from synvirt.proof.keeping import MovedJob, Receipts
from synvirt.proof.signing import HostKey
from synvirt.proof.unpacking import unpack
from synvirt.proof.verifying import checked

PLAN = b'{"mode": "Warm"}\n'
CHECKS = (CheckResult(name="boot", ok=True, detail="agent"), CheckResult(name="port 443", ok=False, detail="closed"))


def rehearsed(state: RehearsalState, *, days_ago: int, checks: tuple[CheckResult, ...] = CHECKS) -> Rehearsal:
    return Rehearsal(
        id=uuid4(), migration_id=UUID(int=1), state=state, created_at=now() - timedelta(days=days_ago), checks=checks
    )


def receipt_with(tmp_path: Path, rehearsal: bytes | None) -> tuple[Receipts, Path]:
    receipts = Receipts(tmp_path / "kept", HostKey(tmp_path / "receipts.key", "kvm1"))
    job = UUID(int=1)
    receipts.make(MovedJob(job, {"job": {"id": str(job)}}, PLAN, (), None, rehearsal=rehearsal))
    with receipts.path_of(job).open("rb") as tar:
        return receipts, unpack(tar, tmp_path / "unpacked", f"receipt-{job}")


def test_the_last_result_is_in_the_receipt(tmp_path: Path) -> None:
    """One that was cancelled has no result."""
    results = [
        rehearsed(RehearsalState.CANCELLED, days_ago=1),
        rehearsed(RehearsalState.FAILED, days_ago=2),
        rehearsed(RehearsalState.PASSED, days_ago=3, checks=CHECKS[:1]),
    ]
    receipts, folder = receipt_with(tmp_path, last_result(PLAN, results))
    found = json.loads((folder / "data/rehearsal.json").read_bytes())
    assert (found["_type"], found["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://in-toto.io/attestation/test-result/v0.1",
    )
    (tested,) = found["subject"]
    assert tested["name"] == "data/plan.json"
    assert found["predicate"] == {
        "result": "FAILED",
        "configuration": [tested],
        "passedTests": ["boot"],
        "failedTests": ["port 443"],
    }
    statement = checked(folder, receipts.key.public).statement
    assert statement is not None
    digests: dict[str, Any] = {one["name"]: one["digest"] for one in statement["subject"]}
    assert digests["data/plan.json"] == tested["digest"]
    assert checked(folder, receipts.key.public).problems == ()
    (folder / "data/rehearsal.json").write_text("{}\n")
    assert any("data/rehearsal.json" in problem for problem in checked(folder, receipts.key.public).problems)


def test_one_that_passed_says_so() -> None:
    found = last_result(PLAN, [rehearsed(RehearsalState.PASSED, days_ago=1, checks=CHECKS[:1])])
    assert found is not None
    assert json.loads(found)["predicate"]["result"] == "PASSED"


@pytest.mark.parametrize("states", [[], [RehearsalState.CANCELLED], [RehearsalState.CHECKING]], ids=str)
def test_a_job_without_a_result_has_no_such_file(tmp_path: Path, states: list[RehearsalState]) -> None:
    receipts, folder = receipt_with(tmp_path, last_result(PLAN, [rehearsed(state, days_ago=1) for state in states]))
    assert not (folder / "data/rehearsal.json").exists()
    assert checked(folder, receipts.key.public).problems == ()
