"""What instant starts of imports and restores have in common."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from synvirt.errors import Conflict
from synvirt.hypervisor import Paused
from synvirt.jobs.instant import GuestWrites, keep_going, layers, refuse_loss, why_not_onto
from synvirt.model.job import Instant
from synvirt.model.values import now


@pytest.mark.parametrize("asked", ["keep", "lose"])
@pytest.mark.parametrize("instant", [None, Instant(state="preparing"), Instant(state="running", started_at=now())])
def test_a_cancel_loses_what_a_guest_wrote_only_where_that_is_asked_for(asked: GuestWrites, instant: Instant | None) -> None:
    would_lose = instant is not None and instant.started_at is not None and asked == "keep"
    with pytest.raises(Conflict, match="loses all that it wrote") if would_lose else nullcontext():
        refuse_loss("the job", instant, asked)


@pytest.mark.parametrize(("device_type", "can"), [("file", True), ("block", True), ("rbd", False)])
def test_a_running_guest_gets_onto_a_file_or_a_device(device_type: str, can: bool) -> None:
    destination: Any = SimpleNamespace(device_type=device_type)
    assert (why_not_onto(destination) is None) is can


def test_each_disk_has_layers_of_its_own_in_the_folder_that_goes_with_the_export() -> None:
    exports: Any = SimpleNamespace(folder=lambda name: Path("/instant") / name / "served")
    made = [layers(exports, "job", number) for number in range(2)]
    files = {path for one in made for path in (one.top, one.between)}
    assert len(files) == 4
    assert {str(Path(file).parent) for file in files} == {"/instant/job"}
    # A service of another version finds them again.
    assert (made[1].top, made[1].between, made[1].socket) == (
        "/instant/job/1-top.qcow2",
        "/instant/job/1-between.qcow2",
        "/instant/job/served/1",
    )


@pytest.mark.parametrize("paused", [None, Paused(), Paused(full="the file system at /small")])
@pytest.mark.parametrize("uuid", [None, UUID(int=1)])
def test_what_it_reads_is_served_before_a_guest_is_resumed(uuid: UUID | None, paused: Paused | None) -> None:
    """And made anew, once the guest could not read it."""
    calls: list[object] = []

    def resume(of: UUID) -> Paused | None:
        calls.append(of)
        return paused

    exports: Any = SimpleNamespace(serve=lambda *_: calls.append("served"), renew=lambda _: calls.append("renewed"))
    hypervisor: Any = SimpleNamespace(resume=resume)
    assert keep_going(exports, hypervisor, "job", [], uuid) == (None if uuid is None else paused)
    resumed = [] if uuid is None else [uuid, "renewed"] if paused == Paused() else [uuid]
    assert calls == ["served", *resumed]
