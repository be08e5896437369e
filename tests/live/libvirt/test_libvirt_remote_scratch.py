"""The scratch folder's room is watched as long as a backup lasts, whatever becomes of other hosts and of single calls."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.live.libvirt import scratch
from tests.needs import need_libvirt

FOLDER = "/var/tmp/synvirt"
XML = f"<pool><target><path>{FOLDER}</path></target></pool>"


@pytest.fixture
def libvirt() -> Any:
    return need_libvirt()


def host(name: str, hangs: "Hanging | None" = None) -> Any:
    """A connection to a host that has a pool over the folder, with 7 bytes free."""

    def pools(_flags: int) -> list[Any]:
        if hangs is not None:
            hangs.reached.set()
            hangs.over.wait()
        return [pool]

    pool = SimpleNamespace(
        name=lambda: "theirs", XMLDesc=lambda _flags: XML, refresh=lambda _flags: None, info=lambda: [0, 0, 0, 7]
    )
    return SimpleNamespace(getHostname=lambda: name, listAllStoragePools=pools)


class Hanging:
    """In the block a call on host `a` hangs."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=scratch.make, args=(host("a", self), FOLDER), daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        self.reached.wait()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()


@pytest.mark.usefixtures("libvirt")
def test_a_host_whose_storage_hangs_holds_up_no_other() -> None:
    found: list[int | None] = []
    with Hanging():
        other = threading.Thread(target=lambda: found.append(scratch.make(host("b"), FOLDER)), daemon=True)
        other.start()
        other.join(10)
        assert found == [7]


@pytest.mark.usefixtures("libvirt")
def test_a_second_call_on_a_hanging_host_does_not_hang_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "LOCK_TIMEOUT_S", 0.01)
    with Hanging():
        assert scratch.make(host("a"), FOLDER) is None


@pytest.mark.parametrize("kind", ["of libvirt", "unexpected"])
def test_a_backup_that_could_not_be_ended_is_ended_at_the_next_look(
    libvirt: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its domain was busy for that moment."""
    monkeypatch.setattr(scratch, "LOOK_EVERY_S", 0.01)
    failures = iter([libvirt.libvirtError("cannot acquire state change lock") if kind == "of libvirt" else MemoryError()])
    ended = threading.Event()

    def end() -> None:
        if (error := next(failures, None)) is not None:
            raise error
        ended.set()

    watch = scratch.Watch(host("a"), FOLDER, 8, end)
    try:
        assert ended.wait(10)
    finally:
        assert watch.stop(10)
