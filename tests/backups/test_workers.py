"""Runs with worker processes: the service reads no guest's byte, and a worker, or a service, that is killed costs little."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from synvirt.backups import runs, working
from synvirt.backups.model import BackupRun, RestoreRequest
from synvirt.jobs.process import started
from synvirt.jobs.wire import Flushed, Result
from synvirt.repository import packs
from synvirt.repository.keys import CHUNK_BYTES
from tests.backups.house import House
from tests.drawn import shared_in_a_file
from tests.fakes.backups import backups_of
from tests.needs import need_root
from tests.repository.points import chunks_read
from tests.running.processes import open_files, until, workers

SLOW_BPS = 2 * CHUNK_BYTES


@shared_in_a_file
def content() -> bytes:
    return Random(9).randbytes(12 * CHUNK_BYTES)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """Its runs are done by worker processes."""
    made = House(tmp_path)
    made.backups.close()
    made.backups = backups_of(made.store, made.guests, tmp_path, started)
    made.backups.start()
    made.image("web", content())
    yield made
    made.close()


def _slow_job(house: House) -> UUID:
    job = house.job("web")
    text = job.model_copy(update={"bandwidth_bps": SLOW_BPS})
    return house.backups._jobs.put(text).id


def _moved(house: House, run: BackupRun) -> bool:
    return house.backups.runs.get(run.id).progress.bytes_done > 0


def _open_in(pid: int) -> list[str]:
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(descriptor.readlink()))
    return found


def test_a_worker_reads_the_guest_and_the_service_does_not(house: House) -> None:
    need_root("what a confined worker has open")
    image, run = house.folder / "images", house.backups.run_job(_slow_job(house))
    until(lambda: _moved(house, run))
    (worker,) = workers()
    assert str(image / "web") in _open_in(worker)
    assert open_files(image) == []
    (known,), _ = house.backups.repositories.page(limit=9, cursor=None)
    key = house.backups.repositories.spec(known.id).key.encode()
    for name in ("cmdline", "environ"):
        assert key not in Path(f"/proc/{worker}/{name}").read_bytes()


def test_a_worker_that_is_killed_is_replaced_and_the_service_reads_nothing_meanwhile(house: House) -> None:
    image, run = house.folder / "images", house.backups.run_job(_slow_job(house))
    until(lambda: _moved(house, run))
    (known,), _ = house.backups.repositories.page(limit=9, cursor=None)
    (worker,) = workers()
    os.kill(worker, signal.SIGKILL)
    until(lambda: workers() != [worker])
    assert open_files(image) == []
    done = house.ended(run)
    assert (done.status, done.error) == ("completed", None)
    request = RestoreRequest(target="export", name="out", bandwidth_bps=SLOW_BPS)
    restoring = house.backups.restore(done.restore_point_ids[0], request)
    until(lambda: _moved(house, restoring))
    (worker,) = workers()
    os.kill(worker, signal.SIGKILL)
    until(lambda: workers() != [worker])
    assert open_files(house.folder / "exports") == []
    done = house.ended(restoring)
    assert (done.status, done.error) == ("completed", None)
    assert [(house.folder / "exports/out/0-vda.raw").read_bytes() == content()] == [True]
    assert house.ended(house.backups.verify(done.restore_point_ids[0])).status == "completed"
    assert house.ended(house.backups.verify_repository(known.id)).status == "completed"


def test_the_figures_of_a_verification_end_with_all_that_it_read(house: House) -> None:
    """Of a point it reads each chunk once, and no zeros: what that comes to is known at its end."""
    house.image("web", content() + bytes(3 * CHUNK_BYTES) + content())
    job = house.job("web")
    (point,) = house.run(job).restore_point_ids
    whole = house.ended(house.backups.verify_repository(job.repository_id))
    assert whole.report is not None
    stored = sum(one.stat().st_size for one in (house.folder / "repository/packs").iterdir())
    assert whole.report.bytes_read == stored
    for run, read in ((whole, stored), (house.ended(house.backups.verify(point)), len(content()))):
        assert (run.status, run.progress.bytes_done, run.progress.bytes_total) == ("completed", read, read)


# The first worker of a collection dies as soon as it has moved what a pack had.
DIES_ONCE = """
import os, sys
if "synvirt.worker" in sys.orig_argv and os.path.exists({when!r}):
    from synvirt.repository import garbage
    condemn = garbage.condemn

    def dying(folder, names):
        condemn(folder, names)
        os.unlink({when!r})
        os._exit(9)

    garbage.condemn = dying
"""


def test_a_collection_moves_in_its_worker_and_the_next_one_goes_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service reads no frame of a pack, not even a page of names."""
    job, folder = house.job("web"), house.folder / "repository"
    (gone,) = house.run(job).restore_point_ids
    (half_used,) = (folder / "packs").iterdir()
    house.image("web", content()[: 2 * CHUNK_BYTES])
    (stays,) = house.run(job).restore_point_ids
    house.backups.remove_point(gone)
    os.utime(half_used, (1, 1))
    (folder / "tmp/dies").touch()
    (house.folder / "sitecustomize.py").write_text(DIES_ONCE.format(when=str(folder / "tmp/dies")))
    monkeypatch.setenv("PYTHONPATH", str(house.folder))
    monkeypatch.setattr(working, "RETRY_PAUSES_S", (0.0,))
    read: list[object] = []
    monkeypatch.setattr(packs, "bytes_of_frame", lambda *arguments: read.append(arguments))
    run = house.ended(house.backups.collect(job.repository_id, dry_run=False))
    assert (run.status, run.error) == ("completed", None)
    assert read == []
    assert not (folder / "tmp/dies").exists()
    assert run.collected is not None
    assert run.collected.bytes_moved > 2 * CHUNK_BYTES
    assert (run.collected.packs_condemned, run.progress.bytes_done) == (1, half_used.stat().st_size)
    assert len(list((folder / "packs").iterdir())) == 3, "it was moved once"
    half_used.unlink()
    assert house.ended(house.backups.verify(stays)).status == "completed"


def test_a_cancelled_run_ends_its_worker(house: House) -> None:
    run = house.backups.run_job(_slow_job(house))
    until(lambda: _moved(house, run))
    house.backups.runs.cancel(run.id)
    assert house.ended(run).status == "cancelled"
    assert workers() == []


CHILD = """
import os, sys
from pathlib import Path
from synvirt.backups import working
from synvirt.backups.model import RestoreRequest
from tests.backups.house import House

working.FLUSH_EVERY_S = 0.01
house = House(Path(sys.argv[1]))
put, seen = working.Watermarks.put, 0

def dying(self, run_id, marks):
    global seen
    put(self, run_id, marks)
    seen += any(mark.offset_bytes >= 4 << 20 for mark in marks.values())
    if seen == int(sys.argv[2]):
        os._exit(9)

working.Watermarks.put = dying
(point,) = house.backups.points.all()
asked = RestoreRequest(target="export", name="out", bandwidth_bps=8 << 20)
house.ended(house.backups.restore(point.id, asked))
os._exit(1)
"""


def test_a_killed_restore_goes_on_from_its_watermark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(tmp_path)
    house.image("web", content())
    house.run(house.job("web"))
    house.close()
    root = Path(__file__).parent.parent.parent
    argv = [sys.executable, "-c", CHILD, str(tmp_path), "1"]
    killed = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert killed.returncode == 9, killed.stdout + killed.stderr
    read = chunks_read(monkeypatch)
    again = House(tmp_path)
    (run,), _ = again.backups.runs.page(limit=1, cursor=None)
    done = again.ended(run)
    assert (done.kind, done.status, done.resumed_count, done.error) == ("restore", "completed", 1, None)
    assert len(read) <= 8, "what was durable is not read again"
    assert [(tmp_path / "exports/out/0-vda.raw").read_bytes() == content()] == [True]
    assert [one.name for one in (tmp_path / "exports").iterdir()] == ["out"]
    assert again.store.backups.all("watermarks", host="local") == again.store.backups.all("request", host="local") == []
    again.close()


def test_what_a_restore_made_goes_when_it_may_not_go_on_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At that start, not at the one after it."""
    monkeypatch.setattr(runs, "RESUMED_MAX", 0)
    house = House(tmp_path)
    house.image("web", content())
    house.run(house.job("web"))
    house.close()
    argv = [sys.executable, "-c", CHILD, str(tmp_path), "1"]
    killed = subprocess.run(
        argv, cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True, timeout=100, check=False
    )
    assert killed.returncode == 9, killed.stdout + killed.stderr
    assert list((tmp_path / "exports").iterdir()) != []
    again = House(tmp_path)
    (run,), _ = again.backups.runs.page(limit=1, cursor=None)
    assert (run.status, run.error and run.error.code) == ("failed", "E_BAK_INTERRUPTED")
    assert list((tmp_path / "exports").iterdir()) == []
    assert again.store.ledgers.owned("run", host="local") == []
    again.close()


def test_a_worker_that_never_lives_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "RETRY_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    house = House(tmp_path)
    house.image("web", content())
    house.backups.close()
    house.backups = backups_of(house.store, house.guests, tmp_path, started)
    house.backups.start()
    run = house.run(house.job("web"))
    assert run.error is not None
    assert (run.status, run.error.code) == ("failed", "E_BAK_INTERNAL")
    assert "exit code 1" in run.error.message
    house.close()


def test_only_what_lasts_counts_as_progress_of_an_attempt() -> None:
    """Or a worker that dies of the same place each time would be started forever."""
    best: dict[str, int] = {}
    mark = Flushed(key="vda", offset_bytes=5, bytes_total=9, bytes_done=5, bytes_zero=0)
    assert working._brought(mark, best)
    assert not working._brought(mark, best)
    assert not working._brought(Result(name="doubt", content={"key": "vda", "why": "x"}), best)
    assert not working._brought(Result(name="stored", content={"stored_bytes": 0}), best)
    looked = Result(name="looked", content={"looked": {"bytes_read": 3}})
    assert working._brought(looked, best), "a verification goes on from there"
    assert not working._brought(looked, best)
    assert working._brought(Result(name="stored", content={"stored_bytes": 7}), best)
