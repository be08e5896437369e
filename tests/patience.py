"""The engine's patience with a source, in tests: they wait for nothing, or give up at once."""

import pytest

from synvirt.migrations import advance, passes, patience, source_vm


def quick_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As patient as ever, but without the pauses."""
    monkeypatch.setattr(patience, "PAUSES_S", dict.fromkeys(patience.PAUSES_S, (0.01,)))
    monkeypatch.setattr(advance, "SWEEP_PAUSES_S", (0.01,))
    monkeypatch.setattr(passes, "RETRY_PAUSES_S", (0.01,))


def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trouble is one too many."""
    quick_tries(monkeypatch)
    for module, name in ((patience, "GUEST_RUNS_S"), (patience, "GUEST_OFF_S"), (source_vm, "LATER_S")):
        monkeypatch.setattr(module, name, 0.0)
