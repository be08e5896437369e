"""The fake hypervisor keeps the laws of the real one, so what is tested on it holds."""

from pathlib import Path
from uuid import UUID

import pytest

from tests.contracts.hypervisors import HypervisorCase, HypervisorContract
from tests.fakes.hypervisor import FakeHypervisor


class TestFakeHypervisor(HypervisorContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> HypervisorCase:
        fake = FakeHypervisor()

        def running(uuid: UUID) -> bool | None:
            return fake.domains[uuid].running if uuid in fake.domains else None

        def silence() -> None:
            fake.fail = "silent"

        return HypervisorCase(fake, tmp_path, running, fake.add_foreign, fake.power_off, silence)
