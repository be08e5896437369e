"""synvirt migrations repair: the job that it begins, and what it says of what that found."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.problems import Problem
from synvirt.model.repair import DiskRepair, Repair, Span
from synvirt.model.values import now
from synvirt.sizes import MIB
from tests.cli.conftest import Run
from tests.fakes.service import PLAN, Service

KEY = "scsi0:0"


def repair_of(job: Migration, check_only: bool) -> Repair:
    return Repair(of=job.id, check_only=check_only, disks=(DiskRepair(key=KEY, volume="web.raw"),))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path, has_pages=False, repair=repair_of)
    with made.served():
        yield made
    made.close()


def ends(service: Service, *, state: State = State.COMPLETED, **found: object) -> Callable[[UUID], None]:
    """An engine whose jobs have found that."""

    def begin(job_id: UUID) -> None:
        def changed(job: Migration) -> Migration:
            assert job.repair is not None
            (disk,) = job.repair.disks
            return job.model_copy(update={"repair": job.repair.model_copy(update={"disks": (disk.model_copy(update=found),)})})

        service.move(job_id, State.COPYING_FULL)
        service.store.change(job_id, State.COPYING_FULL, changed)
        failed = Problem(code="E_MIG_DISK_READ_FAILED", message="the source …", fatal=True, at=now(), state=State.COPYING_FULL)
        service.move(job_id, state, error=failed if state is State.FAILED else None)

    return begin


def test_a_repair_is_a_job_of_its_own(service: Service, run: Run) -> None:
    job = service.submit(PLAN)
    result = run("migrations", "repair", str(job.id)[:8], "--check-only")
    made = service.store.get(service.begun[-1])
    assert made.repair == Repair(of=job.id, check_only=True, disks=(DiskRepair(key=KEY, volume="web.raw"),))
    assert (result.exit_code, f"synvirt migrations watch {made.id}" in result.stdout) == (0, True)
    second = run("migrations", "repair", job.id)
    assert (second.exit_code, "E_MIG_CONFLICT" in second.stderr, str(made.id) in second.stderr) == (1, True, True)
    service.move(made.id, State.COMPLETED)
    printed = json.loads(run("--json", "migrations", "repair", job.id).stdout)
    assert printed["repair"]["check_only"] is False


SPAN = Span(start=8 * MIB, length=4 * MIB)


@pytest.mark.parametrize(
    ("options", "found", "exit_code", "message"),
    [
        (["--check-only"], {"differs": (SPAN,)}, 1, f"{KEY}: {4 * MIB} bytes at {8 * MIB}: differs from the receipt"),
        (["--check-only"], {}, 0, f"{KEY}: holds what the receipt says"),
        ([], {"differs": (SPAN,), "more": True}, 0, f"{KEY}: all of it was repaired from the source"),
        ([], {"differs": (SPAN,), "left": (SPAN,), "state": State.FAILED}, 1, "E_MIG_DISK_READ_FAILED: the source …"),
    ],
)
def test_what_it_found_is_said_at_its_end(
    options: list[str], found: dict[str, object], exit_code: int, message: str, service: Service, run: Run
) -> None:
    job = service.submit(PLAN)
    service.begin = ends(service, **found)  # type: ignore[arg-type]
    result = run("migrations", "repair", job.id, *options, "--watch")
    assert (result.exit_code, message in result.stdout + result.stderr) == (exit_code, True), result.output
    (repair,) = [one for one in _jobs(service) if one.repair is not None]
    shown = run("migrations", "show", repair.id).stdout
    assert f"of job {job.id}" in shown
    if found.get("left"):
        assert "was not repaired: the source does not hold what the receipt says" in shown


def _jobs(service: Service) -> list[Migration]:
    return [Migration.model_validate_json(document) for document in service.store.documents(limit=10)[0]]
