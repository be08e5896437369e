"""Restores in place of a guest in memory: what others have, or do, while they are under way."""

from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.backups.model import Status
from synvirt.backups.working import Copying
from synvirt.jobs.orders import DiskOrder
from synvirt.model.job import Domain
from tests.backups.restores.one_guest import NOW, THEN, OneGuest
from tests.fakes.hypervisor import FakeDomain, FakeHypervisor
from tests.fakes.restoring import XML
from tests.kinds.runs import rows_left
from tests.needs import need_libvirt


@pytest.mark.parametrize("moment", ["before", "during", "of the guest itself", "of single disks"])
def test_a_guest_gets_no_address_back_that_another_one_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Neither would have a network. It may have been given away while its disks are copied. Its own are no hindrance."""
    need_libvirt()
    card = "<interface type='network'><mac address='{}'/><source network='default'/></interface></devices>"
    then, now = (card.format(f"52:54:00:00:00:0{number}") for number in (1, 2))
    with closing(OneGuest(tmp_path, XML.replace("</devices>", then))) as house:
        hypervisor, copy, copied = house.host.hypervisor, Copying.copy, list[str]()
        assert isinstance(hypervisor, FakeHypervisor)
        other = XML.replace(">web<", ">other<").replace("6b3f", "6b40").replace("</devices>", then)

        def taken() -> None:
            hypervisor.domains[UUID(int=9)] = FakeDomain(Domain(name="other", uuid=str(UUID(int=9)), xml=other))

        def copying_it(copying: Copying, order: DiskOrder) -> None:
            copied.append(order.key)
            copy(copying, order)
            if moment == "during":
                taken()

        monkeypatch.setattr(Copying, "copy", copying_it)
        house.image("web", NOW)
        if moment != "of the guest itself":
            house.guest.xml = house.guest.xml.replace(then, now)
        if moment != "during":
            taken()
        before = house.guest.xml
        run = house.restored(*(["vda"] if moment == "of single disks" else []))
        assert run is not None
        if moment.startswith("of"):
            assert (run.status, house.disk.read_bytes() == THEN) == (Status.COMPLETED, True)
            return
        assert (run.status, run.error and run.error.code) == (Status.FAILED, "E_BAK_CONFLICT")
        assert run.error is not None
        assert "52:54:00:00:00:01" in run.error.message
        assert (house.disk.read_bytes() == NOW, house.guest.xml) == (True, before)
        assert (copied, rows_left(house.store)) == (["vda"] if moment == "during" else [], [])
