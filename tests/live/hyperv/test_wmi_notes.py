"""A Hyper-V VM's notes: they are their owner's, whenever they are written, and the journal is one line in them."""

from itertools import count
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from synvirt.live.hyperv import journal, tracking
from synvirt.live.hyperv.adapter import WmiApi
from tests.contracts.live import in_session
from tests.fakes.hyperv.host import FakeHost


def test_what_somebody_writes_in_between_stays_in_the_notes(hyperv: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read by one script, which takes seconds, and written by another."""
    vm = hyperv.hyperv.add_vm(f"vm-{uuid4().hex[:8]}", bytes(1 << 20))
    vm.notes, put, edits, calls = "ticket 0\r\n", hyperv.hyperv._notes, 0, count()

    def after_an_edit(node: str, **parameters: Any) -> Any:
        nonlocal edits
        if next(calls) % 2 == 0:
            edits += 1
            vm.notes = vm.notes.replace(f"ticket {edits - 1}", f"ticket {edits}")
        return put(node, **parameters)

    async def use(adapter: WmiApi) -> None:
        for number in (1, 2):
            await adapter.snapshot(vm.id, f"synvirt-x-{number}")
            await adapter.release(vm.id, f"synvirt-x-{number}")
        assert journal.read(vm.notes)["synvirt-x-1"].p
        for number in (1, 2):
            await adapter.cleanup(vm.id, f"synvirt-x-{number}")
        await adapter.mark(vm.id, "it has moved")

    monkeypatch.setattr(hyperv.hyperv, "_notes", after_an_edit)
    in_session(lambda: WmiApi(hyperv.access()), use)
    assert edits > 8
    assert vm.notes == f"ticket {edits}\r\n\nit has moved"
    assert (vm.snapshots, vm.points) == ([], [])


def test_notes_that_never_read_as_they_were_are_written_all_the_same() -> None:
    """Text may come out of a host in another form than it went in."""
    written: list[tuple[int, str]] = []

    def run(_: str, **asked: Any) -> dict[str, Any]:
        written.append((asked["Checked"], asked["Notes"]))
        return {"written": not asked["Checked"], "notes": "theirs "}

    host: Any = SimpleNamespace(run=run)
    tracking.put_notes(host, str(uuid4()), "theirs", lambda notes: f"{notes}+ours")
    assert written[0] == (1, "theirs+ours")
    assert written[-1] == (0, "theirs +ours")
