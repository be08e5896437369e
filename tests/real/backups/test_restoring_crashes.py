"""A guest that is started between the kill of its restore in place and the next start. Kills at each moment: tests/kinds."""

from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from synvirt.backups.model import Status
from synvirt.backups.restores import in_place
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.jobs.ledger import Ledger
from tests.house import Crash
from tests.kinds.laws import Death, Place
from tests.kinds.restores import NOW, InPlace

MEANWHILE = Random(7).randbytes(len(NOW))


def killed(place: Place, monkeypatch: pytest.MonkeyPatch) -> UUID:
    """When the ledger had turned, and before any disk was taken; and then its guest wrote to the first of them."""
    world = InPlace(place)
    world.prepare()
    death = Death(world.store)
    with monkeypatch.context() as patched:
        patched.setattr(in_place, "_swap", lambda swap: death.happens())
        patched.setattr("threading.excepthook", lambda raised: None)
        job_id = world.submit()
        with pytest.raises(Crash):
            world.run(job_id)
        world.die()
    world.close()
    (place.folder / "images/first.raw").write_bytes(MEANWHILE)
    return job_id


def check(world: InPlace, job_id: UUID) -> None:
    images = world.room.folder / "images"
    assert world.ended(job_id).status is Status.FAILED, "not all of it is as it was"
    assert (images / "first.raw").read_bytes() == MEANWHILE
    assert {one.name for one in images.iterdir()} == {"first.raw", "second.qcow2"}
    assert world.store.ledgers.owned("run", host="local") == []


@pytest.fixture
def place(tmp_path: Path, host: LibvirtHost, data_dir: Path) -> Place:
    return Place(tmp_path, host=host, data_dir=data_dir)


def test_what_a_guest_wrote_between_a_kill_and_the_next_start_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = killed(place, monkeypatch)
    world = InPlace(place)
    check(world, job_id)
    world.close()


def test_the_restore_has_failed_though_the_next_service_is_killed_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was staged may be gone by then, as if its disk had been taken."""
    job_id = killed(place, monkeypatch)
    striking = Ledger.sweep_all

    def killed_again(self: Ledger, *, but: frozenset[UUID] = frozenset()) -> None:
        for name in ("strike", "replace"):
            patched.setattr(type(self._rows), name, crash)
        striking(self, but=but)

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "sweep_all", killed_again)
        with pytest.raises(Crash):
            InPlace(place)
    place.outside["room"].backups.close()
    world = InPlace(place)
    check(world, job_id)
    world.close()


def crash(*_: object, **__: object) -> None:
    raise Crash
