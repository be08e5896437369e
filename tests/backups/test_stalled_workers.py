"""A worker of a backup, a restore, a verification or a collection whose reader loops forever ends, and its run with it, by a
code; the next one works. What loops is put there by a `sitecustomize` of the test, behind the cage, where what took a reader
over would be."""

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random

import pytest

from synvirt.backups.model import BackupRun, RestoreRequest
from synvirt.jobs import process
from synvirt.jobs.process import Worker, started
from synvirt.repository.keys import CHUNK_BYTES
from tests.backups.house import House
from tests.fakes.backups import backups_of
from tests.running.processes import workers

STALLED_S = 2.0
# The loop of this kind takes a whole processor. Those of the others rest in each turn: who waits hears nothing either way.
BUSY = "backup"
SITE = """
import os, sys, time
if "synvirt.worker" in sys.orig_argv and os.path.exists({when!r}):
    import {module} as module

    def looping(*_, **__):
        while True:
            {turn}

    module.{name} = looping
"""
# By the kind of run: what of the product's own loops.
LOOPS = {
    "backup": ("synvirt.disks.raw.files", "RawReader.read_into"),
    "backup, before the first byte": ("synvirt.disks.raw.files", "RawReader.extents"),
    "restore": ("synvirt.repository.packs", "read_frame"),
    "verify one": ("synvirt.repository.packs", "read_frame"),
    "verify all": ("synvirt.repository.packs", "check_whole"),
    "collect": ("synvirt.repository.packs", "read_frame"),
}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    made.backups.close()
    loops = tmp_path / "loops"

    def limited() -> AbstractAsyncContextManager[Worker]:
        """A worker that does not loop may pause for long on a busy machine."""
        return started(stalled_s=STALLED_S if loops.exists() else STALLED_S * 60)

    made.backups = backups_of(made.store, made.guests, tmp_path, limited)
    made.backups.start()
    made.image("web", Random(9).randbytes(3 * CHUNK_BYTES))
    yield made
    made.close()


def _begun(house: House, kind: str, loops: Path) -> BackupRun:
    """A run of that kind, whose worker loops; what it needs was made before."""
    backups, job = house.backups, house.job("web")
    if kind.startswith("backup"):
        loops.touch()
        return backups.run_job(job.id)
    (point,) = house.run(job).restore_point_ids
    loops.touch()
    begin = {
        "restore": lambda: backups.restore(point, RestoreRequest(target="export", name="out")),
        "verify one": lambda: backups.verify(point),
        "verify all": lambda: backups.verify_repository(job.repository_id),
        "collect": lambda: backups.collect(job.repository_id, dry_run=False),
    }
    return begin[kind]()


@pytest.mark.parametrize("kind", LOOPS)
def test_one_that_loops_ends_and_the_next_works(
    kind: str, house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = LOOPS[kind]
    loops = tmp_path / "loops"
    site = tmp_path / "site"
    site.mkdir()
    turn = "pass" if kind == BUSY else "time.sleep(0.05)"
    (site / "sitecustomize.py").write_text(SITE.format(module=module, name=name, when=str(loops), turn=turn))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(process, "STOP_GRACE_S", 0.2)
    run = _begun(house, kind, loops)
    done = house.ended(run)
    assert (done.status, done.error and done.error.code) == ("failed", "E_BAK_SOURCE_READ_FAILED"), done.error
    assert done.error is not None
    assert f"nothing for {STALLED_S:g} s" in done.error.message
    assert workers() == []
    loops.unlink()
    assert house.run(house.backups.all_jobs()[0]).status == "completed"
