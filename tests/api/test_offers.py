"""What this host keeps for others, as who runs it sees it."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.sizes import MIB
from tests.fakes.service import Service
from tests.repository.points import back_up, disk, opened

API = "http://synvirt/api/v1/backup/offers"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "office").mkdir()
    offers = {
        "office": {"path": str(tmp_path / "office"), "user": "office", "quota_bytes": 64 * MIB},
        "away": {"path": str(tmp_path / "away"), "user": "other", "keep_days": 7},
    }
    service = Service(tmp_path / "data", backup_offers=offers)
    with service.served():
        yield service
    service.close()


def test_what_lies_there_and_what_is_protected(service: Service) -> None:
    office = service.backups.offers.by_name["office"]
    repository = opened(office._folder(), new=True)
    point = back_up(repository, disk("AB"))
    repository.keep(point, kept=True)
    with service.local() as client:
        away, found = client.get(API).json()["items"]
        assert (away["name"], away["used_bytes"], "there is no folder" in away["problem"]) == ("away", None, True)
        assert client.get(f"{API}/office").json() == found
        assert (found["user"], found["keep_days"], found["quota_bytes"], found["points_count"]) == ("office", 30, 64 * MIB, 1)
        assert (found["capacity_bytes"], found["protected"]) == (64 * MIB, [str(point)])
        assert 0 < found["used_bytes"] < MIB
        page = client.get("http://synvirt/backups/offers").text
        assert (str(point) in page, "64" in page, "there is no folder" in page) == (True, True, True)
        path = f"http://synvirt/backups/offers/office/points/{point}/release"
        assert "Take the protection off" in client.get(path).text
        assert client.post(path).headers["Location"] == "/backups/offers"
        assert client.get(f"{API}/office").json()["protected"] == []
        assert client.delete(f"{API}/office/protections/{point}").json()["code"] == "E_BAK_NOT_FOUND"
        repository.keep(point, kept=True)
        assert client.delete(f"{API}/office/protections/{point}").status_code == 204
        for answer in (client.get(f"{API}/nosuch"), client.delete(f"{API}/nosuch/protections/{uuid4()}")):
            assert (answer.status_code, answer.json()["code"]) == (404, "E_BAK_NOT_FOUND")


def test_a_host_that_keeps_nothing_for_others(tmp_path: Path) -> None:
    service = Service(tmp_path)
    with service.served(), service.local() as client:
        assert client.get(API).json()["items"] == []
        assert "offers no folder to others" in client.get("http://synvirt/backups/offers").text
    service.close()


def test_at_the_command_line(service: Service) -> None:
    import json

    from typer.testing import CliRunner

    from synvirt.cli import app

    repository = opened(service.backups.offers.by_name["office"]._folder(), new=True)
    point = back_up(repository, disk("AB"))
    repository.keep(point, kept=True)

    def printed(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["backup", *arguments, "--data-dir", str(service.settings.data_dir)])
        assert done.exit_code == 0, done.output
        return done.output

    assert "office" in printed("offers")
    assert "there is no folder" in printed("offers")
    assert [one["name"] for one in json.loads(printed("offers", "--json"))["items"]] == ["away", "office"]
    assert str(point) in printed("show-offer", "office")
    assert "not protected any more" in printed("release-point", "office", str(point))
    assert str(point) not in printed("show-offer", "office")
