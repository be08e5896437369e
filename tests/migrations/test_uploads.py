"""A plan that names an upload: imported whole, kept while it is read, refused when it is not there."""

import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from synvirt.errors import Conflict, InvalidPlan, UploadNotFound
from synvirt.migrations.intake import Intake
from synvirt.model.files import Upload
from synvirt.model.kinds import State
from synvirt.model.machine import VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.settings import Settings
from synvirt.settings.data_dir import prepare_data_dir
from tests.house import House
from tests.offline.appliances import image, raw_disk


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    prepare_data_dir(Settings(data_dir=tmp_path))
    house = House(tmp_path, real_importers=True)
    yield house
    house.close()


@pytest.fixture
def upload(house: House, tmp_path: Path) -> Upload:
    incoming = house.uploads.begin("web.qcow2")
    incoming.write(memoryview(image(tmp_path / "images", "web.qcow2", "qcow2", raw_disk()).read_bytes()))
    return incoming.finish(None)


def plan(upload_id: UUID, kind: str = "qcow2") -> MigrationPlan:
    ref = {"kind": "upload", "upload_id": str(upload_id)}
    return MigrationPlan.model_validate({"source": {"Offline": kind}, "source_ref": ref, "mode": "Cold"})


def test_an_upload_is_imported(house: House, upload: Upload) -> None:
    job = house.intake.submit(plan(upload.id))
    assert job.name == "web"
    with pytest.raises(Conflict):
        house.uploads.remove(upload.id)
    done = house.run(job.id)
    assert done.state == State.COMPLETED, done.last_error
    assert done.manifest is not None
    assert done.manifest.name == "web"
    assert house.volume(done, "disk0").read_bytes() == raw_disk()
    house.uploads.remove(upload.id)


def test_an_upload_of_another_kind_is_refused_at_once(house: House, upload: Upload) -> None:
    with pytest.raises(InvalidPlan, match=r"web.qcow2 is of kind qcow2, not vmdk"):
        house.intake.submit(plan(upload.id, "vmdk"))


def test_an_upload_that_is_not_there_is_refused_at_once(house: House) -> None:
    nobody = uuid4()
    with pytest.raises(UploadNotFound, match=str(nobody)):
        house.intake.submit(plan(nobody))


def test_an_upload_is_not_removed_under_a_job_that_is_submitted(
    house: House, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of both is refused, also where the submission comes between the look for readers and the removal."""
    errors: list[Exception] = []

    def submit() -> None:
        try:
            house.intake.submit(plan(upload.id))
        except Exception as error:
            errors.append(error)

    submitting, readers = threading.Thread(target=submit), house.store.uploads.readers

    def meanwhile(upload_id: UUID) -> list[UUID]:
        found = readers(upload_id)
        submitting.start()
        submitting.join(1)
        return found

    monkeypatch.setattr(house.store.uploads, "readers", meanwhile)
    house.uploads.remove(upload.id)
    submitting.join()
    assert [type(error) for error in errors] == [UploadNotFound]
    assert house.store.unended() == []


def test_an_upload_that_is_removed_while_its_plan_is_checked_is_refused(
    house: House, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep of expired uploads, for example: the check reads the file, and takes its time."""
    check = house.intake._check

    def slow(wanted: MigrationPlan) -> VmManifest | None:
        manifest = check(wanted)
        house.uploads.remove(upload.id)
        return manifest

    monkeypatch.setattr(house.intake, "_check", slow)
    with pytest.raises(UploadNotFound, match=str(upload.id)):
        house.intake.submit(plan(upload.id))
    assert house.store.unended() == []


def test_an_upload_that_is_gone_when_the_job_begins_fails_it(house: House, upload: Upload) -> None:
    job = house.intake.submit(plan(upload.id))
    house.store.uploads.remove(upload.id)
    failed = house.run(job.id)
    assert failed.state == State.FAILED
    assert failed.last_error is not None
    assert failed.last_error.code == "E_MIG_UPLOAD_NOT_FOUND"
    assert failed.last_error.hint
    assert house.leftovers() == []


def test_a_job_has_its_machine_s_name_as_its_domain_has(house: House, upload: Upload) -> None:
    """Where the machine is not known when the plan is accepted, from the inspection on; a name that was given stays."""
    done = house.run(house.intake.submit(plan(upload.id)).id)
    assert done.domain is not None
    assert done.name == done.domain.name == "web"
    house.intake = Intake(
        house.store, house.board, host="local", check=lambda plan: None, begin=lambda job: None, wake=lambda job: None
    )
    job = house.intake.submit(plan(upload.id))
    assert job.name == "web.qcow2"
    assert house.run(job.id).name == "web"
    named = house.intake.submit(plan(upload.id).model_copy(update={"name": "moved by hand"}))
    assert house.run(named.id).name == "moved by hand"
