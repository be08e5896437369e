"""The fake hypervisor keeps the laws of the real one, so what is tested on it holds."""

from pathlib import Path
from uuid import UUID

import pytest

from synvirt.hypervisor import Early, Volume
from synvirt.migrations.landing import machine_of
from synvirt.sizes import MIB
from tests.contracts.hypervisors import EarlyGuest, HypervisorCase, HypervisorContract, job
from tests.fakes.hypervisor import FakeHypervisor


class TestFakeHypervisor(HypervisorContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> HypervisorCase:
        fake = FakeHypervisor()

        def running(uuid: UUID) -> bool | None:
            return fake.domains[uuid].running if uuid in fake.domains else None

        def silence() -> None:
            fake.fail = "silent"

        return HypervisorCase(
            fake, tmp_path, running, fake.add_foreign, fake.power_off, silence, early=lambda: _early(fake, tmp_path)
        )


def _early(fake: FakeHypervisor, folder: Path) -> EarlyGuest:
    migration = job()
    layers = Early(str(folder / "top.qcow2"), str(folder / "between.qcow2"), str(folder / "socket"))
    volume = Volume("disk1", str(folder / f"{migration.id}.raw"), "file", layers)
    Path(volume.path).write_bytes(bytes(MIB))
    fake.lay(volume, MIB)
    domain = fake.domain_xml(machine_of(migration), [volume])
    fake.define(domain)
    fake.start(UUID(domain.uuid))
    written = bytearray(MIB)

    def writes() -> None:
        place = len(bytes(written).rstrip(b"\0"))
        written[place : place + 7] = b"a write"
        fake.guest_writes(UUID(domain.uuid), 0, place, b"a write")

    def kept(path: Path) -> None:
        assert path.read_bytes() == written

    return EarlyGuest(migration, domain, volume, writes, kept)
