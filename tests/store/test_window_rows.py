"""The service's windows: by their ids, shared by all hosts, and kept while a job waits for one."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from synvirt.errors import Conflict, NotFound
from synvirt.model.kinds import State
from synvirt.model.windows import LockOut, Window
from synvirt.store import Store
from synvirt.store.tables import windows
from tests.house import live_plan
from tests.jobs.migrations import migration


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    yield store
    store.close()


def window(id_: str, **fields: object) -> Window:
    night = Window(
        id=id_, name=id_, start=datetime.fromisoformat("2030-01-01T22:00:00"), end=datetime.fromisoformat("2030-01-02T04:00:00")
    )
    return night.model_copy(update=fields)


def test_windows_are_kept_by_their_ids(store: Store) -> None:
    locked = LockOut(start=datetime.fromisoformat("2030-01-01T23:00:00"), end=datetime.fromisoformat("2030-01-02"))
    night = window("night", timezone="Europe/Berlin", rrule="FREQ=DAILY", lockouts=(locked,))
    for one in (night, window("evening")):
        store.windows.add(one)
    assert store.windows.get("night") == night
    assert [one.id for one in store.windows.all()] == ["evening", "night"]
    with pytest.raises(Conflict, match="a window night already"):
        store.windows.add(window("night"))
    changed = store.windows.change("night", lambda before: before.model_copy(update={"name": "The night"}))
    assert store.windows.get("night") == changed == night.model_copy(update={"name": "The night"})
    store.windows.remove("evening")
    assert store.windows.all() == [changed]
    for gone in (store.windows.get, store.windows.remove, lambda id_: store.windows.change(id_, lambda before: before)):
        with pytest.raises(NotFound) as found:
            gone("nigth")
        assert found.value.hint == "did you mean night?"


def test_of_two_hosts_that_add_a_window_at_once_one_is_refused(store: Store, database_url: str) -> None:
    other, together = Store(database_url), threading.Barrier(2, timeout=60)

    def add(rows: Store) -> list[bool]:
        done = []
        for number in range(20):
            together.wait()
            try:
                rows.windows.add(window(f"night-{number}"))
                done.append(True)
            except Conflict:
                done.append(False)
        return done

    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(add, (store, other))
    assert [one for one, same in zip(ours, theirs, strict=True) if one == same] == []
    other.close()


def test_a_window_stays_while_a_job_waits_for_it(store: Store) -> None:
    for name in ("night", "night2"):
        store.windows.add(window(name))
    job = migration(name="web", plan=live_plan(warm={"window_id": "night2"}))
    store.add(job, host="h")
    with pytest.raises(Conflict, match=f"window night2 is needed by 1 job: web .{job.id}"):
        store.windows.remove("night2")
    store.windows.remove("night")
    store.change(job.id, State.QUEUED, lambda one: one.model_copy(update={"state": State.FAILED}))
    store.windows.remove("night2")
    assert store.windows.all() == []


def test_what_a_later_version_added_to_a_window_survives(store: Store) -> None:
    store.windows.add(window("night"))
    with store._writing() as db:
        (text,) = db.execute(windows.select().with_only_columns(windows.c.document)).scalars()
        db.execute(windows.update().values(document=json.dumps(json.loads(text) | {"colour": "blue"}), version="1.9"))
    store.windows.change("night", lambda before: before.model_copy(update={"name": "n"}))
    with store._reading() as db:
        (row,) = db.execute(windows.select())
    assert (json.loads(row.document)["colour"], json.loads(row.document)["name"], row.version) == ("blue", "n", "1.9")
