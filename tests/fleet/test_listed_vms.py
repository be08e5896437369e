import threading
from collections.abc import Mapping
from uuid import UUID

import pytest

from synvirt.errors import SourceUnreachable
from synvirt.fleet import listed_vms
from synvirt.fleet.listed_vms import ListedVms
from synvirt.live import VmRow
from tests.fleet.made import SOURCE
from tests.running.processes import until


def test_a_source_is_asked_in_the_background_and_again_where_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed_vms, "AGAIN_S", 0.0)
    answers, source_ids = threading.Event(), []

    async def rows(source_id: UUID) -> Mapping[str, VmRow]:
        source_ids.append(source_id)
        if len(source_ids) < 3:
            raise SourceUnreachable("it does not answer") if len(source_ids) == 1 else KeyError("a row")
        answers.wait(30)
        return {"a": VmRow("a", "a", "on", host="esx1"), "b": VmRow("b", "b", "off")}

    listed = ListedVms(rows)
    try:
        assert listed.of(SOURCE, "a") is None
        until(lambda: listed.of(SOURCE, "a") is None and len(source_ids) == 3)
        assert listed.of(SOURCE, "a") is None, "nobody waits for its answer"
        assert listed.failure_of(SOURCE) == "its answer cannot be used"
        answers.set()
        until(lambda: listed.of(SOURCE, "a") is not None)
        rows_now = [listed.of(SOURCE, name) for name in ("a", "b", "gone")]
        assert [row.host if row else None for row in rows_now] == ["esx1", "", ""]
        assert source_ids == [SOURCE] * 3, "it is not asked again so soon"
        assert listed.failure_of(SOURCE) is None
    finally:
        listed.close()


def test_a_source_for_which_there_is_no_thread_now_is_asked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no member from it would ever get a host."""
    monkeypatch.setattr(listed_vms, "AGAIN_S", 0.0)

    async def rows(_: UUID) -> Mapping[str, VmRow]:
        return {"a": VmRow("a", "a", "on", host="esx1")}

    def crowded(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    listed = ListedVms(rows)
    try:
        with monkeypatch.context() as no_memory:
            no_memory.setattr(listed._pool, "submit", crowded)
            assert listed.of(SOURCE, "a") is None
        until(lambda: listed.of(SOURCE, "a") is not None)
    finally:
        listed.close()
