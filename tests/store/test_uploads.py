"""The uploads' queries, on SQLite and on a real PostgreSQL."""

from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from synvirt.errors import UploadNotFound
from synvirt.fleet.model import MEMBER_ENDS, MemberState
from synvirt.fleet.waves import Waves
from synvirt.model.files import Upload
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, OfflineKind, State
from synvirt.model.plan import HostPathRef, MigrationPlan, PlanSource, SourceRef, UploadRef
from synvirt.model.values import now
from synvirt.store import Store
from synvirt.store.uploads import MEMBERS_LEFT
from tests.fleet.made import member, wave

HOST = "h1"


def an_upload() -> Upload:
    created, id_ = now(), uuid4()
    return Upload(
        id=id_,
        filename="münchen.ova",
        size_bytes=30 << 30,
        sha256="0" * 64,
        path=f"/imports/.uploads/{id_}/münchen.ova",
        created_at=created,
        expires_at=created + timedelta(days=7),
    )


def a_job(ref: SourceRef, state: State = State.QUEUED) -> Migration:
    plan = MigrationPlan(source=PlanSource(Offline=OfflineKind.OVA_ARCHIVE), source_ref=ref, mode=Mode.COLD)
    return Migration(id=uuid4(), name="a", plan=plan, state=state, mode_effective=Mode.COLD, created_at=now())


def test_an_upload_comes_back_as_it_went_in_on_its_host_and_nowhere_else(store: Store) -> None:
    upload = an_upload()
    store.uploads.add(upload, host=HOST)
    assert store.uploads.get(upload.id, host=HOST) == Upload.model_validate_json(upload.model_dump_json())
    with pytest.raises(UploadNotFound, match=str(upload.id)):
        store.uploads.get(upload.id, host="h2")
    assert store.uploads.page(host="h2", limit=10) == ([], None)
    assert store.uploads.all(host="h2") == []


def test_pages_are_newest_first_and_miss_nobody(store: Store) -> None:
    added = [an_upload() for _ in range(5)]
    for upload in added:
        store.uploads.add(upload, host=HOST)
    seen: list[UUID] = []
    cursor = None
    while True:
        found, cursor = store.uploads.page(host=HOST, limit=2, cursor=cursor)
        seen += [upload.id for upload in found]
        if cursor is None:
            break
        store.uploads.add(an_upload(), host=HOST)
    assert seen == [upload.id for upload in reversed(added)]


def test_what_is_removed_is_gone_and_may_be_removed_again(store: Store) -> None:
    upload, other = an_upload(), an_upload()
    for one in (upload, other):
        store.uploads.add(one, host=HOST)
    for _ in range(2):
        store.uploads.remove(upload.id)
    assert [left.id for left in store.uploads.all(host=HOST)] == [other.id]


def test_the_readers_of_an_upload_are_the_jobs_that_name_it_and_have_not_ended(store: Store) -> None:
    upload = an_upload()
    by_id = a_job(UploadRef(kind="upload", upload_id=upload.id))
    by_path = a_job(HostPathRef(kind="offline_host_path", path=upload.path), State.COPYING_FULL)
    ended = a_job(UploadRef(kind="upload", upload_id=upload.id), State.FAILED)
    other = a_job(UploadRef(kind="upload", upload_id=uuid4()))
    for job in (by_id, by_path, ended, other):
        store.add(job, host=HOST)
    assert store.uploads.readers(upload.id) == [by_id.id, by_path.id]


@pytest.mark.parametrize("by_path", [False, True])
def test_an_upload_is_that_of_the_waves_whose_members_have_not_ended(store: Store, by_path: bool) -> None:
    upload, waves = an_upload(), Waves(store.waves)
    ref = HostPathRef(kind="offline_host_path", path=upload.path) if by_path else UploadRef(kind="upload", upload_id=upload.id)
    made = [waves.create(wave(member("a", plan=a_job(ref).plan)).model_copy(update={"name": name})) for name in ("may", "june")]
    other = a_job(UploadRef(kind="upload", upload_id=uuid4())).plan
    waves.create(wave(member("a", plan=other)))
    assert store.uploads.waves(upload.id) == ["may", "june"]
    waves.cancel(made[0].id)
    waves.skip(made[0].id, "a")
    assert store.uploads.waves(upload.id) == ["june"]
    assert {*MEMBERS_LEFT, *MEMBER_ENDS} == set(MemberState)
