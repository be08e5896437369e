"""Secrets of jobs: sealed beside the job, gone when it ends, sealed again with a new key."""

from pathlib import Path

import pytest

from synvirt.keyring import Keyring
from synvirt.live.registry import BY_KIND
from synvirt.migrations.secrets import JobSecrets, SealedElsewhere
from synvirt.migrations.sources.registered import Sources
from synvirt.model.job import Migration
from synvirt.model.kinds import ENDS, State
from synvirt.store import Store
from tests.store.test_store import a_job

SECRET = b'{"password": "hush"}'


def added(store: Store, secrets: JobSecrets) -> Migration:
    job = a_job(name="web")
    with secrets.sealed(job.id, SECRET) as sealed:
        store.add(job, host="h", sealed=sealed)
    return job


def test_a_job_keeps_them_until_it_ends(store: Store, tmp_path: Path) -> None:
    secrets = JobSecrets(store, Keyring(tmp_path / "migrator.key"))
    for end in sorted(ENDS):
        job = added(store, secrets)
        assert secrets.opened(job.id) == SECRET
        assert b"hush" not in (store.sealed(job.id) or b"hush")
        store.change(job.id, State.QUEUED, lambda now: now.model_copy(update={"state": State.COPYING_FULL}))
        assert secrets.opened(job.id) == SECRET
        store.change(job.id, State.COPYING_FULL, lambda now, end=end: now.model_copy(update={"state": end}))  # type: ignore[misc]
        assert secrets.opened(job.id) is None


def test_those_of_one_job_open_for_no_other(store: Store, tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "migrator.key")
    secrets = JobSecrets(store, keyring)
    one, other = added(store, secrets), a_job(name="other")
    store.add(other, host="h", sealed=store.sealed(one.id))
    with pytest.raises(SealedElsewhere, match="cannot be opened"):
        secrets.opened(other.id)


def test_a_new_key_takes_them_along(store: Store, tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "migrator.key")
    secrets = JobSecrets(store, keyring)
    job = added(store, secrets)
    before = store.sealed(job.id)
    sources = Sources(store.sources, keyring, host="h", platforms=BY_KIND, folder=tmp_path)
    assert sources.rotate_key() == 0, "it counts sources"
    assert store.sealed(job.id) != before
    assert secrets.opened(job.id) == SECRET
    # A service that starts finds the key that opens them, though no source is registered.
    (tmp_path / "migrator.key").rename(tmp_path / "migrator.key.new")
    again = Keyring(tmp_path / "migrator.key")
    Sources(store.sources, again, host="h", platforms=BY_KIND, folder=tmp_path)
    assert JobSecrets(store, again).opened(job.id) == SECRET
