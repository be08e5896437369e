"""Whole imports from elsewhere: the plan, the job, its worker process, the volume. Over nginx, S3 by moto, Samba."""

import contextlib
import dataclasses
import json
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from synvirt.errors import AuthFailed, BadRequest, InvalidPlan
from synvirt.migrations import patience
from synvirt.migrations.memory import JobMemory
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import Limits, MigrationPlan
from synvirt.offline.elsewhere import Rules
from tests.fakes.workers import in_process
from tests.house import Crash, House, crash_at
from tests.migrations.test_bad_archives import NAME, OVF, files_of
from tests.offline import appliances
from tests.running.forked_small import by_python
from tests.running.processes import until, workers
from tests.servers import remote_servers as servers

# Stands nowhere by chance.
HUSH = "hush-5f2c91"


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    (tmp_path / "house").mkdir()
    house = House(tmp_path / "house", real_importers=True)
    yield house
    house.close()


@pytest.fixture(scope="module")
def ova(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ova")
    vmdk = appliances.stream_vmdk(folder, "disk1.vmdk", appliances.raw_disk()).read_bytes()
    return appliances.archive(folder / f"{NAME}.ova", files_of(OVF, vmdk))


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory, ova: Path) -> Iterator[servers.Nginx]:
    with servers.nginx(tmp_path_factory.mktemp("nginx")) as server:
        (server.folder / ova.name).write_bytes(ova.read_bytes())
        yield server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory, ova: Path) -> Iterator[servers.S3]:
    with servers.s3(tmp_path_factory.mktemp("s3")) as server:
        server.put(f"a folder/{ova.name}", ova.read_bytes())
        yield server


@pytest.fixture(scope="module")
def samba(tmp_path_factory: pytest.TempPathFactory, ova: Path) -> Iterator[servers.Samba]:
    with servers.samba(tmp_path_factory.mktemp("samba")) as server:
        (server.folder / ova.name).write_bytes(ova.read_bytes())
        yield server


def plan(url: str, kind: str = "ova_archive", **ref: Any) -> MigrationPlan:
    return MigrationPlan.model_validate(
        {"source": {"Offline": kind}, "source_ref": {"kind": "remote_url", "url": url, **ref}, "mode": "Cold"}
    )


def by_https(server: servers.Nginx) -> MigrationPlan:
    password = "p%40ss:w%C3%B6rd"
    return plan(
        f"https://{servers.USER}:{password}@127.0.0.1:{server.tls_port}/private/{NAME}.ova?token={HUSH}",
        options={"fingerprint_sha256": server.certificates.fingerprint},
    )


def by_s3(server: servers.S3) -> MigrationPlan:
    keys = {"access_key_id": server.access_key_id, "secret_access_key": server.secret_access_key}
    return plan(f"s3://{server.bucket}/a folder/{NAME}.ova", credentials=keys, options={"endpoint": server.endpoint})


def by_smb(server: servers.Samba) -> MigrationPlan:
    return plan(f"{server.url}{NAME}.ova", credentials={"username": "root", "password": servers.PASSWORD})


WAYS: dict[str, tuple[str, Callable[[Any], MigrationPlan]]] = {
    "https": ("nginx", by_https),
    "s3": ("s3", by_s3),
    "smb": ("samba", by_smb),
}


@pytest.fixture(params=WAYS)
def remote_plan(request: pytest.FixtureRequest) -> MigrationPlan:
    server, way = WAYS[request.param]
    return way(request.getfixturevalue(server))


def assert_imported(house: House, job: Migration) -> None:
    assert job.state == State.COMPLETED, job.last_error
    assert house.volume(job, job.disks[0].key).read_bytes() == appliances.raw_disk()


def secrets_of(plan: MigrationPlan) -> list[str]:
    assert plan.source_ref.kind == "remote_url"
    given = [secret.get_secret_value() for name, secret in plan.source_ref.credentials.items() if name != "username"]
    return [*given, *([HUSH, servers.PASSWORD, "p%40ss"] if HUSH in plan.source_ref.url else [])]


def test_it_is_imported_and_its_secrets_are_nowhere(
    house: House, remote_plan: MigrationPlan, capfd: pytest.CaptureFixture[str]
) -> None:
    job = house.intake.submit(remote_plan)
    sealed = house.store.sealed(job.id)
    assert sealed
    stored = database(house)
    done = house.run(job.id)
    assert_imported(house, done)
    assert house.store.sealed(job.id) is None, "a job that has ended has no use for secrets"
    assert done.manifest is not None
    assert done.name == done.manifest.name
    output = "".join(capfd.readouterr()).encode()
    for secret in secrets_of(remote_plan):
        for text in (stored, database(house), output, done.model_dump_json().encode(), str(done).encode(), sealed):
            assert secret.encode() not in text


def database(house: House) -> bytes:
    """All that the store holds, and its files as they are."""
    with sqlite3.connect(house.folder / "store.db") as connection:
        dump = "\n".join(connection.iterdump()).encode()
    connection.close()
    return dump + b"".join(path.read_bytes() for path in house.folder.glob("store.db*"))


@pytest.mark.timeout(300)
def test_the_service_dies_at_every_commit_and_the_import_goes_on(tmp_path: Path, nginx: servers.Nginx) -> None:
    """A new service knows the file and its credentials by what was stored and sealed alone."""
    for commit in range(1, 100):
        folder = tmp_path / str(commit)
        folder.mkdir()
        house = House(folder, real_importers=True, workers=in_process)
        job = house.intake.submit(by_https(nginx))
        house.store.on_commit = crash_at(commit)
        try:
            done = house.run(job.id)
        except Crash:
            house.close()
            house = House(folder, real_importers=True, workers=in_process, hypervisor=house.hypervisor)
            assert_imported(house, house.run(job.id))
            house.close()
        else:
            assert_imported(house, done)
            house.close()
            return
    raise AssertionError("the job never ended")


def test_a_killed_worker_goes_on_from_its_watermark(tmp_path: Path) -> None:
    """What was copied before is not fetched again: the server is asked for little more than the file."""
    raw = Random(7).randbytes(24 << 20)
    with servers.nginx(tmp_path / "nginx") as server, servers.wire(server.port) as wire:
        path = server.folder / "large.vhdx"
        path.write_bytes(appliances.image(tmp_path, "large.vhdx", "vhdx", raw).read_bytes())
        (tmp_path / "house").mkdir()
        house = House(tmp_path / "house", real_importers=True)
        wanted = plan(f"http://127.0.0.1:{wire.port}/open/large.vhdx", kind="vhdx")
        job = house.intake.submit(wanted.model_copy(update={"limits": Limits(bandwidth_bps=8 << 20)}))
        killed = threading.Event()

        def kill_once() -> None:
            marks = house.store.watermarks(job.id, 1)
            if not killed.is_set() and any(mark.offset_bytes > 8 << 20 for mark in marks.values()):
                killed.set()
                for worker in workers():
                    os.kill(worker, signal.SIGKILL)

        house.store.on_commit = kill_once
        done = house.run(job.id)
        assert killed.is_set()
        assert done.state == State.COMPLETED, done.last_error
        assert house.volume(done, "disk0").read_bytes()[: len(raw)] == raw
        house.close()
        # Inspected twice, copied once; what was fetched ahead of the watermark and lost with the worker comes on top.
        assert wire.bytes_back < len(raw) + (40 << 20)


def test_a_server_that_is_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    raw = Random(8).randbytes(16 << 20)
    with servers.nginx(tmp_path / "nginx") as server, servers.wire(server.port) as wire:
        path = server.folder / "large.vhdx"
        path.write_bytes(appliances.image(tmp_path, "large.vhdx", "vhdx", raw).read_bytes())
        (tmp_path / "house").mkdir()
        house = House(tmp_path / "house", real_importers=True)
        wanted = plan(f"http://127.0.0.1:{wire.port}/open/large.vhdx", kind="vhdx")
        job = house.intake.submit(wanted.model_copy(update={"limits": Limits(bandwidth_bps=8 << 20)}))
        back = threading.Timer(3, lambda: setattr(wire, "refuse", False))

        def go_away() -> None:
            marks = house.store.watermarks(job.id, 1)
            if not wire.refuse and not back.is_alive() and any(mark.offset_bytes for mark in marks.values()):
                house.store.on_commit = lambda: None
                wire.refuse = True
                back.start()

        house.store.on_commit = go_away
        done = house.run(job.id)
        assert done.state == State.COMPLETED, done.last_error
        assert house.volume(done, "disk0").read_bytes()[: len(raw)] == raw
        house.close()


def test_who_cancels_does_not_wait_for_a_slow_server(house: House, nginx: servers.Nginx) -> None:
    with servers.wire(nginx.port) as wire:
        job = house.intake.submit(plan(f"http://127.0.0.1:{wire.port}/open/{NAME}.ova"))
        wire.open.clear()

        def answer_when_it_is_cancelled() -> None:
            if house.store.get(job.id).ended:
                wire.open.set()

        house.store.on_commit = answer_when_it_is_cancelled
        cancelling = threading.Timer(0.5, house.intake.cancel, (job.id,))
        cancelling.start()
        assert house.run(job.id).state == State.CANCELLED
        assert wire.open.is_set()
        assert house.leftovers() == []


def test_no_secret_is_in_the_workers_arguments_or_environment(
    house: House, nginx: servers.Nginx, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []

    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):  # a worker takes ten times as long to be there at all
            for worker in workers():
                with contextlib.suppress(OSError):
                    seen.append(Path(f"/proc/{worker}/cmdline").read_bytes() + Path(f"/proc/{worker}/environ").read_bytes())

    job = house.intake.submit(by_https(nginx))
    looking = threading.Thread(target=look)
    looking.start()
    try:
        with by_python():
            assert_imported(house, house.run(job.id))
    finally:
        ended.set()
        looking.join()
    assert seen
    for secret in (HUSH, servers.PASSWORD):
        assert not any(secret.encode() in text for text in seen)


def test_a_file_that_is_replaced_before_the_job_goes_on_fails_it(tmp_path: Path, ova: Path) -> None:
    with servers.nginx(tmp_path / "nginx") as server:
        (server.folder / "a.ova").write_bytes(ova.read_bytes())
        (tmp_path / "house").mkdir()
        house = House(tmp_path / "house", real_importers=True)
        job = house.intake.submit(plan(server.url + "a.ova"))

        def crash_in_the_copy() -> None:
            if house.store.memory.get(job.id, JobMemory).files is not None:
                raise Crash

        house.store.on_commit = crash_in_the_copy
        with pytest.raises(Crash):
            house.run(job.id)
        house.store.on_commit = lambda: None
        os.utime(server.folder / "a.ova", (1, 1))
        failed = house.run(job.id)
        assert failed.state == State.FAILED
        assert failed.last_error is not None
        assert "changed or replaced" in failed.last_error.message
        assert house.leftovers() == []
        house.close()


def test_bytes_that_do_not_have_their_digest_fail_the_job(tmp_path: Path, ova: Path) -> None:
    content = bytearray(ova.read_bytes())
    wrong = content.rindex(b"disk1.vmdk)= ") + len(b"disk1.vmdk)= ")
    content[wrong : wrong + 1] = b"1" if content[wrong : wrong + 1] == b"0" else b"0"
    with servers.nginx(tmp_path / "nginx") as server:
        (server.folder / "a.ova").write_bytes(content)
        (tmp_path / "house").mkdir()
        house = House(tmp_path / "house", real_importers=True)
        failed = house.run(house.intake.submit(plan(server.url + "a.ova")).id)
        assert failed.state == State.FAILED
        assert failed.last_error is not None
        assert failed.last_error.code == "E_MIG_MALFORMED_ARCHIVE"
        assert house.leftovers() == []
        house.close()


def test_what_cannot_work_is_refused_with_the_plan(house: House, nginx: servers.Nginx) -> None:
    with pytest.raises(AuthFailed) as caught:
        house.intake.submit(plan(f"http://127.0.0.1:{nginx.port}/private/{NAME}.ova?{HUSH}"))
    assert HUSH not in str(caught.value)
    with pytest.raises(InvalidPlan, match="is of kind ova_archive"):
        house.intake.submit(plan(f"{nginx.url}{NAME}.ova", kind="xva_archive"))
    with pytest.raises(BadRequest, match="not among the hosts"):
        house.intake.submit(plan("http://169.254.169.254/latest/vm.ova"))
    assert house.store.documents(limit=5)[0] == []


def test_a_job_waits_for_the_key_that_sealed_its_credentials(
    house: House, nginx: servers.Nginx, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host has changed the fleet's key, and sealed them again: the job failed with E_MIG_INTERNAL, its copy lost."""
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    monkeypatch.setattr(patience, "PAUSES_S", dict.fromkeys(patience.PAUSES_S, (0.1,)))
    job = house.intake.submit(by_https(nginx))
    house.close()
    key = house.folder / "migrator.key"
    new = key.read_bytes()
    key.unlink()
    again = House(house.folder, real_importers=True)
    ended: list[Migration] = []
    running = threading.Thread(target=lambda: ended.append(again.run(job.id)))
    running.start()
    until(lambda: again.store.get(job.id).last_error is not None)
    error = again.store.get(job.id).last_error
    assert error is not None
    assert (error.code, error.fatal) == ("E_MIG_AUTH_FAILED", False)
    assert f"the credentials of job {job.id} cannot be opened with the key of this host" in error.message
    assert "copy keyring/migrator.key" in (error.hint or "")
    key.write_bytes(new)
    running.join(60)
    assert_imported(again, ended[0])
    assert ended[0].last_error is None
    again.close()


def test_rules_of_the_service_hold_for_the_worker_too(house: House, nginx: servers.Nginx) -> None:
    """A redirect that leads to another host while it copies is checked there, by the rules that the plan was checked by."""
    house.rooms = dataclasses.replace(house.rooms, remote_rules=Rules(allowed_hosts=("127.0.0.1",)))
    job = house.intake.submit(plan(f"{nginx.url}{NAME}.ova"))
    assert_imported(house, house.run(job.id))
    assert json.loads(job.model_dump_json())["plan"]["source_ref"]["credentials"] == {}
