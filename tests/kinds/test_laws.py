"""Each law, of each kind of job that needs no hypervisor, at each of its moments."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from synvirt.migrations import source_vm
from tests.fakes.loops import store_at_once
from tests.kinds.laws import LAWS, Kind, Place, cases, holds
from tests.kinds.table import KINDS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "law", "part"), cases(KINDS, real=False))
def test_law(kind: Kind, law: str, part: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A guest that was told to shut down is looked at for a while (test_tidying.py); these go off at once or never.
    monkeypatch.setattr(source_vm, "SHUTTING_DOWN_S", 0.0)
    with nullcontext() if kind.threads else store_at_once():
        holds(LAWS[law], kind, part, lambda name: Place(folder / name))
