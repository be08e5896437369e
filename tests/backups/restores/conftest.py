"""What tests of restores share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.backups import trouble
from synvirt.backups.restores import instant
from tests.backups.restores.place import Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(trouble, "AGAIN_S", (0.05,))
    monkeypatch.setattr(instant, "LOOK_EVERY_S", 0.02)
    made = Place(tmp_path)
    yield made
    made.close()
