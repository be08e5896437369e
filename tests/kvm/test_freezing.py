"""A freeze counts only where nothing else thawed the guest, and its guard knows before it begins. Real guests: tests/real."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import SynvirtError
from synvirt.kvm import freezing, orphans
from synvirt.kvm.orphans import Orphan


class Frozen:
    """A guest's agent, and the guard's words, in the order in which they come. `thaws`: what each thaw says."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, thaws: tuple[int, ...], states: tuple[str, ...], ready: bool
    ) -> None:
        self.said: list[str] = []
        self._thaws, self._states = iter(thaws), iter(states)

        @contextlib.contextmanager
        def guard(*_: object) -> Iterator[Any]:
            yield SimpleNamespace(say=self.said.append) if ready else None

        monkeypatch.setattr(freezing, "PAUSE_S", 0.0)
        monkeypatch.setattr(freezing, "_guard", guard)
        monkeypatch.setattr(freezing, "load", lambda: SimpleNamespace(libvirtError=SynvirtError))
        agent = SimpleNamespace(answers=lambda _: True, is_windows=lambda _: False, ask=lambda *_: next(self._states))
        monkeypatch.setattr(freezing, "agent", agent)

    def agentSetResponseTimeout(self, *_: int) -> None: ...  # noqa: N802 - libvirt's names

    def fsFreeze(self) -> int:  # noqa: N802
        self.said.append("freeze")
        return 2

    def fsThaw(self) -> int:  # noqa: N802
        self.said.append("thaw")
        return next(self._thaws)


def held(guest: Frozen) -> freezing.Still:
    with freezing.still("test:///", guest) as found:
        guest.said.append("the moment")
    return found


def test_the_guard_knows_before_the_freeze_and_after_the_thaw(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = Frozen(monkeypatch, thaws=(2,), states=("thawed",), ready=True)
    assert held(guest).quiesced
    assert guest.said == ["hold", "freeze", "the moment", "thaw", "thawed"]


def test_a_guest_that_says_that_it_is_frozen_is_thawed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = Frozen(monkeypatch, thaws=(1, 1), states=("frozen", "thawed"), ready=True)
    assert held(guest).quiesced, "both of its file systems were frozen until then"
    assert guest.said[-3:] == ["thaw", "thaw", "thawed"]


def test_what_something_else_has_thawed_was_not_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = Frozen(monkeypatch, thaws=(0,), states=("thawed",), ready=True)
    found = held(guest)
    assert not found.quiesced
    assert found.why_not


def test_what_took_too_long_was_not_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezing, "HOLD_S", 0.0)
    assert not held(Frozen(monkeypatch, thaws=(2,), states=("thawed",), ready=True)).quiesced


def test_without_a_guard_nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = Frozen(monkeypatch, thaws=(), states=(), ready=False)
    assert not held(guest).quiesced
    assert guest.said == ["the moment"]


def test_a_host_that_starts_no_guard_freezes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that would have been crash-consistent failed."""
    guard = freezing._guard
    guest = Frozen(monkeypatch, thaws=(), states=(), ready=False)
    monkeypatch.setattr(freezing, "_guard", guard)
    guest.UUIDString = guest.name = lambda: "guest"  # type: ignore[attr-defined]

    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refused)
    assert not held(guest).quiesced
    assert guest.said == ["the moment"]


@pytest.mark.parametrize("now", [None, Orphan(7, "another"), Orphan(7, "guest")])
def test_a_process_that_has_the_number_of_an_orphan_is_left_alone(monkeypatch: pytest.MonkeyPatch, now: Orphan | None) -> None:
    ended: list[int] = []
    monkeypatch.setattr(orphans, "_suspect", lambda *_: now)
    monkeypatch.setattr(os, "kill", lambda pid, _: ended.append(pid))
    orphans.end([Orphan(7, "guest")], Path("/driver"), lambda _: False)
    assert ended == ([7] if now == Orphan(7, "guest") else [])
    orphans.end([Orphan(7, "guest")], Path("/driver"), lambda _: True)
    assert len(ended) <= 1, "its guest runs"
