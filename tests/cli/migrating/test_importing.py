"""synvirt import and inspect: from here, from the import root, and to a service elsewhere."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.cli.client import Client
from synvirt.errors import InvalidPlan
from synvirt.model.kinds import OfflineKind
from synvirt.model.plan import HostPathRef, MigrationPlan, UploadRef
from synvirt.sizes import GIB
from tests.cli.conftest import Run
from tests.fakes.service import PASSWORD, USER, Service
from tests.offline import appliances, test_several


@pytest.fixture
def ova(tmp_path: Path) -> Path:
    """An appliance that is no host file of the service."""
    (tmp_path / "downloads").mkdir()
    return appliances.archive(tmp_path / "downloads" / "web.ova", appliances.appliance("qemu_user"))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Service, list[str]]]:
    """A service, and the options by which it is spoken to over HTTPS."""
    (tmp_path / "service").mkdir()
    service = Service(tmp_path / "service", has_pages=False)
    monkeypatch.setenv("SYNVIRT_PASSWORD", PASSWORD)
    with service.served() as server:
        certificate = service.settings.keyring_dir / "tls.crt"
        yield service, ["--server", server.address, "--user", USER, "--cacert", str(certificate)]
    service.close()


def test_a_file_here_is_sent_to_a_service_elsewhere_and_its_kind_found_there(
    elsewhere: tuple[Service, list[str]], run: Run, ova: Path
) -> None:
    service, options = elsewhere
    done = run("import", ova, *options)
    assert done.exit_code == 0, done.stderr
    [begun], [upload] = service.begun, service.uploads.page(limit=10)[0]
    plan = service.store.get(begun).plan
    assert plan.source_ref == UploadRef(kind="upload", upload_id=upload.id)
    assert plan.source.Offline == OfflineKind.OVA_ARCHIVE
    assert Path(upload.path).read_bytes() == ova.read_bytes()
    assert done.stdout.splitlines()[-1].startswith(f"Job {begun} is queued.")


def test_a_relative_path_is_a_file_here(
    elsewhere: tuple[Service, list[str]], run: Run, ova: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, options = elsewhere
    monkeypatch.chdir(ova.parent)
    assert run("import", "web.ova", *options).exit_code == 0
    assert len(service.uploads.page(limit=10)[0]) == 1


def test_what_the_service_elsewhere_has_is_not_sent(elsewhere: tuple[Service, list[str]], run: Run, ova: Path) -> None:
    service, options = elsewhere
    there = service.settings.imports_dir / "web.ova"
    there.write_bytes(ova.read_bytes())
    assert run("import", there, *options).exit_code == 0
    [begun] = service.begun
    plan = service.store.get(begun).plan
    assert plan.source_ref == HostPathRef(kind="offline_host_path", path=str(there))
    assert plan.source.Offline == OfflineKind.OVA_ARCHIVE
    assert service.uploads.page(limit=10)[0] == []


def test_a_file_that_is_nowhere(elsewhere: tuple[Service, list[str]], run: Run) -> None:
    _, options = elsewhere
    for path, code, exit_code in (
        ("/nowhere/web.ova", "E_MIG_HOST_PATH_REJECTED", 1),
        ("nowhere.ova", "E_MIG_BAD_REQUEST", 2),
    ):
        done = run("import", path, *options)
        assert (done.exit_code, done.stderr.split(":")[0]) == (exit_code, code), done.stderr


def test_what_is_no_vm_is_not_sent(elsewhere: tuple[Service, list[str]], run: Run, tmp_path: Path) -> None:
    service, options = elsewhere
    (tmp_path / "notes.txt").write_text("hello")
    done = run("import", tmp_path / "notes.txt", *options)
    assert (done.exit_code, done.stderr.split(":")[0]) == (1, "E_MIG_UNSUPPORTED_FORMAT")
    assert service.begun == []
    assert service.uploads.page(limit=10)[0] == [], "it was not even sent"


def test_a_description_without_its_disks_is_not_sent(service: Service, run: Run, ova: Path) -> None:
    folder = appliances.folder(ova.parent / "as files", appliances.appliance("qemu_user"))
    done = run("import", folder / "qemu_user.ovf", "--upload")
    assert (done.exit_code, "its disks lie in files beside it" in done.stderr) == (2, True), done.stderr
    assert service.uploads.page(limit=10)[0] == []


def test_what_was_sent_for_a_plan_that_is_refused_stays(service: Service, run: Run, ova: Path) -> None:
    def refuse(plan: MigrationPlan) -> None:
        raise InvalidPlan("not this one")

    service.intake._check = refuse
    done = run("import", ova, "--upload")
    [upload] = service.uploads.page(limit=10)[0]
    assert (done.exit_code, f"synvirt uploads show {upload.id}" in done.stderr) == (1, True)
    assert "E_MIG_INVALID_PLAN: not this one" in done.stderr


@pytest.mark.parametrize(
    ("at", "what_stays"),
    [
        ("/host-files/inspect", "no job is created\n"),
        ("/inspect", "no job is created; the file stays at the service until it expires: synvirt uploads show "),
        ("/migrations", "the service may have taken the job: synvirt migrations list\n"),
    ],
)
def test_an_interrupt_prints_what_stays(
    service: Service, run: Run, ova: Path, monkeypatch: pytest.MonkeyPatch, at: str, what_stays: str
) -> None:
    ask = Client.ask

    def interrupted(self: Client, method: str, path: str, **content: Any) -> str:
        if path.endswith(at):
            raise KeyboardInterrupt
        return ask(self, method, path, **content)

    monkeypatch.setattr(Client, "ask", interrupted)
    sent = ["--upload"] if at == "/inspect" else []
    if not sent:
        ova = ova.rename(service.settings.imports_dir / ova.name)
    done = run("import", ova, *sent)
    assert (done.exit_code, f"Interrupted: {what_stays}" in done.stderr) == (130, True), done.stderr


def test_a_file_that_was_sent_to_be_tried_stays(service: Service, run: Run, ova: Path) -> None:
    done = run("import", ova, "--upload", "--dry-run")
    [upload] = service.uploads.page(limit=10)[0]
    assert f"synvirt uploads show {upload.id}" in done.stderr
    assert service.begun == []


def test_a_file_outside_the_import_root_may_be_sent(service: Service, run: Run, ova: Path) -> None:
    refused = run("import", ova)
    assert (refused.exit_code, refused.stderr.split(":")[0]) == (1, "E_MIG_HOST_PATH_REJECTED")
    assert "--upload" in refused.stderr
    assert run("import", ova, "--upload").exit_code == 0
    [begun], [upload] = service.begun, service.uploads.page(limit=10)[0]
    assert service.store.get(begun).plan.source_ref == UploadRef(kind="upload", upload_id=upload.id)


def test_json_prints_the_job_alone(service: Service, run: Run, ova: Path) -> None:
    done = run("import", ova, "--upload", "--json")
    assert UUID(json.loads(done.stdout)["id"]) == service.begun[0]


def test_the_targets_options_reach_the_plan(service: Service, run: Run, ova: Path) -> None:
    options = ["--cpus", 3, "--memory", "1.5GiB", "--disk-bus", "sata", "--no-start", "--name", "www", "--destination", "fast"]
    more = ["--skip-disk", "a", "--skip-disk", "b", "--waive", "disk-unreadable:c"]
    done = run("import", ova, "--upload", *options, *more)
    assert done.exit_code == 0, done.stderr
    plan = service.store.get(service.begun[0]).plan
    target = plan.target
    assert (target.cpu_count, target.memory_bytes, target.disk_bus) == (3, 3 * GIB // 2, "sata")
    assert target.destination == "fast"
    assert (target.start, target.name) == (False, "www")
    assert (plan.skip_disks, plan.waive_concerns) == (("a", "b"), ("disk-unreadable:c",))


@pytest.mark.parametrize(
    "wrong",
    [["--memory", "4"], ["--memory", "four GiB"], ["--cpus", "0"], ["--disk-bus", "usb"], ["--kind", "iso"], ["--mode", "hot"]],
)
def test_options_that_cannot_be_are_wrong_usage(service: Service, run: Run, ova: Path, wrong: list[str]) -> None:
    assert run("import", ova, *wrong).exit_code == 2
    assert service.begun == []


def test_inspect_asks_the_service_elsewhere(elsewhere: tuple[Service, list[str]], run: Run, ova: Path) -> None:
    service, options = elsewhere
    (service.settings.imports_dir / "web.ova").write_bytes(ova.read_bytes())
    here = json.loads(run("inspect", ova, "--json").stdout)
    assert json.loads(run("inspect", "web.ova", "--json", *options).stdout) == here
    done = run("inspect", "web.ova", *options)
    assert ["kind", "ova_archive"] in [line.split() for line in done.stdout.splitlines()]
    assert "guest-unknown: " in done.stdout


@pytest.mark.parametrize("given", ["{}", "link.ova", ".", "./web.ova", "../downloads/web.ova"])
def test_inspect_needs_no_service_and_takes_a_path_as_a_person_writes_it(
    given: str, run: Run, ova: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ova.parent
    (folder.parent / "link.ova").symlink_to(ova)
    (folder / "link.ova").symlink_to(folder.parent / "link.ova")
    if given == ".":
        folder = appliances.folder(ova.parent / "as files", appliances.appliance("qemu_user"))
    monkeypatch.chdir(folder)
    done = run("inspect", given.format(ova))
    assert done.exit_code == 0, done.stderr
    assert ["name", "handmade"] in [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("name", "hint"), [("raw.img", "qemu-img convert -f raw"), ("folder", "has its .ovf"), ("web.ova.gz", "gunzip")]
)
def test_what_is_no_vm_says_what_to_do(name: str, hint: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "raw.img").write_bytes(appliances.raw_disk())
    (tmp_path / "folder").mkdir()
    (tmp_path / "web.ova.gz").write_bytes(b"\x1f\x8b" + bytes(100))
    done = run("inspect", tmp_path / name)
    assert (done.exit_code, hint in done.stderr) == (1, True), done.stderr


def test_a_file_whose_kind_is_no_question_is_not_asked_for_it(service: Service, run: Run) -> None:
    """Before, the hint was --kind, which changes nothing of an empty file."""
    (service.settings.imports_dir / "web.ova").touch()
    done = run("import", "web.ova")
    assert (done.exit_code, "--kind" in done.stderr, "copy it again" in done.stderr.lower()) == (1, False, True), done.stderr


@pytest.mark.parametrize("how", ["sent", "here"])
def test_one_of_several_vms(how: str, service: Service, run: Run, tmp_path: Path) -> None:
    folder = service.settings.imports_dir if how == "here" else tmp_path
    path = test_several.shop(folder, "archive")
    upload = ["--upload"] if how == "sent" else []
    refused = run("import", path, *upload)
    assert (refused.exit_code, "--vm" in refused.stderr) == (1, True), refused.stderr
    assert run("import", path, *upload, "--vm", "db").exit_code == 0
    ref = service.store.get(service.begun[0]).plan.source_ref
    assert isinstance(ref, HostPathRef | UploadRef)
    assert ref.vm == "db"
    assert ["name", "db"] in [line.split() for line in run("inspect", path, "--vm", "db").stdout.splitlines()]
    if isinstance(ref, UploadRef):
        assert ["name", "db"] in [
            line.split() for line in run("uploads", "inspect", str(ref.upload_id), "--vm", "db").stdout.splitlines()
        ]
