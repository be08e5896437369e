"""A house with one VM to move, whose jobs try again quickly."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.sizes import MIB
from tests.fakes.workers import in_process
from tests.house import VM, House
from tests.migrations.patience.waiting import DISK
from tests.patience import quick_tries


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    quick_tries(monkeypatch)
    house = House(tmp_path, workers=in_process)
    house.platform.add_vm(VM, {DISK: random.Random(1).randbytes(3 * MIB)})
    yield house
    house.close()
