"""GET /destinations, and `synvirt destinations`, on a real server."""

import json
import threading

import httpx
import pytest
from typer.testing import CliRunner

from synvirt.cli import app
from synvirt.destinations.directory import DirectoryDestination
from synvirt.errors import DiskWriteFailed
from synvirt.kvm import limit
from tests.fakes.service import Service


class Away(DirectoryDestination):
    def free_bytes(self) -> int:
        raise DiskWriteFailed("this host has no zfs pool tank")


@pytest.fixture
def names(service: Service) -> list[str]:
    service.destinations["away"] = Away(service.settings.volumes_dir)
    return list(service.destinations)


def test_each_is_shown_the_default_first(client: httpx.Client, names: list[str]) -> None:
    answer = client.get("/destinations").json()
    assert [one["name"] for one in answer["items"]] == names
    first, away = answer["items"]
    assert (first["kind"], first["default"], first["problem"]) == ("directory", True, None)
    assert first["free_bytes"] > 0
    assert (away["default"], away["free_bytes"], away["problem"]) == (False, None, "this host has no zfs pool tank")
    assert answer["next_cursor"] is None


def test_one_that_hangs_is_shown_as_such(client: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "FOLDER_ANSWERS_S", 0.05)
    answers = threading.Event()

    class Silent(DirectoryDestination):
        def free_bytes(self) -> int:
            answers.wait(20)
            return 0

    monkeypatch.setitem(service.destinations, "silent", Silent(service.settings.volumes_dir))
    shown = client.get("/destinations").json()["items"][-1]
    answers.set()
    assert (shown["name"], shown["free_bytes"], shown["problem"]) == (
        "silent",
        None,
        "the destination did not answer for 0.05 s",
    )


def test_the_command_line_shows_them(client: httpx.Client, service: Service, names: list[str]) -> None:
    argv = ["destinations", "--data-dir", str(service.settings.data_dir)]
    shown = CliRunner().invoke(app, argv)
    assert shown.exit_code == 0, shown.output
    assert "directory" in shown.output
    assert "this host has no zfs pool tank" in shown.output
    assert len(json.loads(CliRunner().invoke(app, [*argv, "--json"]).output)["items"]) == len(names)
