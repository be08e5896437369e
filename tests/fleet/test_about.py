"""What a host says of itself to the others: true of each destination, also while another one does not answer."""

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt import destinations
from synvirt.destinations import free_bytes_of
from synvirt.destinations.directory import DirectoryDestination
from synvirt.migrations.hosts.about import AboutHost
from tests.fakes.hypervisor import FakeHypervisor
from tests.running.processes import until


class Hangs(DirectoryDestination):
    """Its server is silent until `answers` is set. `asked`: the threads that have asked it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.answers, self.asked = threading.Event(), list[threading.Thread]()

    def free_bytes(self) -> int:
        self.asked.append(threading.current_thread())
        self.answers.wait(60)
        return 7

    def shared_id(self) -> str | None:
        self.answers.wait(60)
        return "a share"


@pytest.fixture
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hangs]:
    monkeypatch.setattr(destinations, "ANSWERS_S", 0.05)
    made = Hangs(tmp_path)
    yield made
    made.answers.set()


def free(about: AboutHost) -> dict[str, int | None]:
    return {one["name"]: one["free_bytes"] for one in json.loads(about.document())["destinations"]}


def test_one_that_hangs_keeps_no_other_from_being_described(hangs: Hangs, tmp_path: Path) -> None:
    """Its room as it was before would get it all members of a wave, for as long as it hangs."""
    about = AboutHost({"silent": hangs, "other": DirectoryDestination(tmp_path)}, FakeHypervisor())
    hangs.answers.set()
    about.ask()
    assert free(about)["silent"] == 7
    hangs.answers.clear()
    hangs.asked.clear()
    for _ in range(5):
        about.ask()
    found = free(about)
    assert found["silent"] is None
    assert (found["other"] or 0) > 0
    assert len(hangs.asked) == 1
    described = json.loads(about.document())["destinations"]
    assert [one["shared_id"] for one in described] == ["a share", None], "its id stays right while it is away"
    hangs.answers.set()

    def is_back() -> bool:
        about.ask()
        return free(about)["silent"] == 7

    until(is_back)


def test_who_waits_for_the_first_description_is_called_once(tmp_path: Path) -> None:
    hypervisor, called = FakeHypervisor(), list[str]()
    about = AboutHost({"only": DirectoryDestination(tmp_path)}, hypervisor)
    assert "room" not in json.loads(about.document())
    with about.kept(lambda: called.append(about.document())):
        until(lambda: called)
    (document,) = called
    assert json.loads(document)["room"]["networks"][0] == hypervisor.default_network


def test_a_destination_is_not_kept_for_having_been_asked(tmp_path: Path) -> None:
    destination = DirectoryDestination(tmp_path)
    assert free_bytes_of(destination) > 0
    seen = weakref.ref(destination)
    del destination
    gc.collect()
    assert seen() is None
