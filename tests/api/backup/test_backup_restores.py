"""Restores, boot tests and their screens over HTTP and by the command line; guests are files, and there is no hypervisor."""

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from typer.testing import CliRunner

from synvirt.backups.model import BackupJobRequest, BackupRepositoryRequest, RestoreRequest
from synvirt.cli import app
from tests.api.backup.conftest import served_guest
from tests.drawn import drawn
from tests.fakes.backups import ended
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.restoring import XML, restore_host_of
from tests.fakes.service import Service
from tests.running.processes import until


def disk_content() -> bytes:
    return drawn(1_000_001)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with served_guest(tmp_path, disk_content()) as made:
        yield made


@pytest.fixture
def point(service: Service, tmp_path: Path) -> str:
    return backed_up(service, tmp_path)


def backed_up(service: Service, tmp_path: Path) -> str:
    request = BackupRepositoryRequest(name="here", kind="local", path=str(tmp_path / "repository"))
    repository = service.backups.add_repository(request)
    job = service.backups.add_job(BackupJobRequest(name="nightly", vm_ids=("web",), repository_id=repository.id))
    return str(ended(service.backups, service.backups.run_job(job.id).id).restore_point_ids[0])


def printed(service: Service, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["backup", *arguments, "--data-dir", str(service.settings.data_dir)])
    return result.exit_code, result.output


def test_the_command_exports_as_it_is_reported(service: Service, point: str) -> None:
    code, output = printed(service, "restore", point, "--format", "qcow2", "--name", "out", "--disk", "vda")
    assert (code, "exports/out" in output) == (0, True)
    found = {one.name for one in (service.settings.data_dir / "exports/out").iterdir()}
    assert found == {"0-vda.qcow2", "domain.xml"}
    code, output = printed(service, "restore", point, "--json", "--name", "raw")
    assert json.loads(output)["path"] == "exports/raw"
    assert [(service.settings.data_dir / "exports/raw/0-vda.raw").read_bytes() == disk_content()] == [True]


def test_a_guest_runs_at_once_and_only_who_means_it_loses_what_it_wrote(tmp_path: Path) -> None:
    hypervisor = FakeHypervisor()
    service = Service(tmp_path / "service", restore_host=restore_host_of(tmp_path, hypervisor))
    service.guests.image("web", disk_content())
    service.guests.xml = XML
    (tmp_path / "repository").mkdir()
    with service.served():
        point = backed_up(service, tmp_path)
        code, output = printed(service, "restore", point, "--target", "new-domain", "--name", "at-once", "--instant", "--json")
        run = json.loads(output)
        assert (code, run["status"], run["instant"]["state"]) == (0, "completed", "done")
        assert hypervisor.domains[UUID(run["id"])].running, "--instant is --start too"
        hypervisor.fail = "pivot"
        request = RestoreRequest(target="new_domain", name="again", start=True, instant=True)
        again = service.backups.restore(UUID(point), request).id
        until(lambda: service.backups.runs.get(again).error)
        code, output = printed(service, "cancel", str(again))
        assert (code, "E_BAK_CONFLICT" in output, "--lose-guest-writes" in output) == (1, True, True)
        code, output = printed(service, "show", str(again))
        assert ("moving" in output, "The guest is kept" in output) == (True, True)
        assert printed(service, "cancel", str(again), "--lose-guest-writes")[0] == 0
        assert ended(service.backups, again).status == "cancelled"
    assert [str(uuid) for uuid in hypervisor.domains] == [run["id"]]
    service.close()


REFUSED = (
    ("E_BAK_BAD_REQUEST", "restore {point} --path /"),
    ("E_BAK_BAD_REQUEST", "restore {point} --disk vdz"),
    ("E_BAK_BAD_REQUEST", "restore {point} --target new-domain --path /srv"),
    ("E_BAK_BAD_REQUEST", "restore {point} --target in-place"),
    ("E_BAK_BAD_REQUEST", "restore {point} --name out/../.."),
    ("E_BAK_BAD_REQUEST", "restore {point} --instant"),
    ("E_BAK_BAD_REQUEST", "boot-test {point}"),
    ("E_BAK_NOT_FOUND", "boot-test 00000000-0000-0000-0000-000000000000"),
    ("E_BAK_NOT_FOUND", "mount none"),
    ("E_BAK_NOT_FOUND", "mount 00000000-0000-0000-0000-000000000000"),
    ("E_BAK_BAD_REQUEST", "mount {point} --disk vdz"),
    ("E_BAK_BAD_REQUEST", "mount {point} --server https://there.invalid"),
)


def test_what_cannot_be_done_is_said_with_its_code(service: Service, point: str) -> None:
    for code, command in REFUSED:
        exit_code, output = printed(service, *command.format(point=point).split())
        assert (exit_code != 0, code in output, "Traceback" in output) == (True, True, False), (command, output)
        assert not (service.settings.data_dir / "exports").exists(), command
