"""How the settings become the house."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from pydantic import ValidationError

import synvirt
from synvirt.backups.model import BackupRun, Status
from synvirt.cage.scratch import scratch_folder
from synvirt.destinations import DestinationAway
from synvirt.errors import Conflict, DiskWriteFailed, NotFound, SourceUnreachable
from synvirt.kvm import limit, qemu_user
from synvirt.main import import_root
from synvirt.main.destinations import make_destinations
from synvirt.main.import_root import resolving
from synvirt.main.running import service
from synvirt.migrations.removing import retained
from synvirt.model.kinds import State
from synvirt.model.values import now
from synvirt.settings import DirectorySetting, Settings, ZfsSetting
from synvirt.settings.data_dir import prepare_data_dir
from synvirt.store import Store
from tests.jobs.migrations import migration
from tests.running.processes import until


def test_the_settings_destinations_are_the_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zfs by default; where its pool is away the service starts all the same, and plans are refused for it."""
    monkeypatch.setenv("PATH", str(tmp_path))  # whatever this host has of zfs
    monkeypatch.setattr("synvirt.programs.ADMIN_PATHS", ())
    settings = Settings(
        data_dir=tmp_path,
        zfs_pool="tank",
        destinations={
            "fast": ZfsSetting(kind="zfs", pool="nvme", namespace="vms"),
            "archive": DirectorySetting(kind="directory", path=tmp_path / "archive"),
        },
    )
    made = make_destinations(settings)
    assert {name: one.kind for name, one in made.items()} == {
        "zfs": "zfs",
        "directory": "directory",
        "fast": "zfs",
        "archive": "directory",
    }
    assert next(iter(made)) == "zfs"
    with pytest.raises(DiskWriteFailed, match="zfs is not installed"):
        made["zfs"].free_bytes()
    assert made["archive"].free_bytes() > 0


def test_no_folder_is_made_below_a_file_system_that_is_not_mounted(tmp_path: Path) -> None:
    folder = DirectorySetting(kind="directory", path=tmp_path / "srv/volumes", mount_point=tmp_path / "srv")
    made = make_destinations(Settings(data_dir=tmp_path, destinations={"fast": folder}))
    with pytest.raises(DestinationAway, match="nothing is mounted at"):
        made["fast"].free_bytes()
    assert not (tmp_path / "srv").exists()


def test_a_file_system_that_hangs_keeps_no_service_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "FOLDER_ANSWERS_S", 0.05)
    answers, real = threading.Event(), qemu_user.make

    def hangs(folder: Path) -> None:
        if folder.name == "silent":
            answers.wait(30)
        real(folder)

    monkeypatch.setattr(qemu_user, "make", hangs)
    silent = DirectorySetting(kind="directory", path=tmp_path / "silent")
    made = make_destinations(Settings(data_dir=tmp_path, destinations={"silent": silent}))
    assert not silent.path.exists()
    assert made["directory"].free_bytes() > 0
    answers.set()
    until(silent.path.exists)


def test_an_import_root_that_is_silent_is_a_source_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tick of all waves asks for the files of a member, and must go on. One thread waits, however often it is asked."""
    monkeypatch.setattr(limit, "FOLDER_ANSWERS_S", 0.05)
    (tmp_path / "web.ova").write_bytes(b"")
    answers, real, asked = threading.Event(), os.path.exists, []

    def hangs(path: Path) -> bool:
        if path == tmp_path:
            asked.append(path)
            answers.wait(30)
        return real(path)

    monkeypatch.setattr(os.path, "exists", hangs)
    resolve = resolving(tmp_path)
    for _ in range(3):
        with pytest.raises(SourceUnreachable, match=r"the import root does not answer; it was asked for web\.ova"):
            resolve("web.ova")
    assert len(asked) == 1
    answers.set()
    until(lambda: not any(thread.name == "libvirt" for thread in threading.enumerate()))
    assert resolve("web.ova") == tmp_path / "web.ova"
    with pytest.raises(NotFound):
        resolve("db.ova")


def test_a_path_under_the_import_root_that_is_silent_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "FOLDER_ANSWERS_S", 0.05)
    answers = threading.Event()
    monkeypatch.setattr(import_root, "resolve_beneath", lambda root, path: answers.wait(30))
    with pytest.raises(SourceUnreachable, match="does not answer"):
        resolving(tmp_path)("mounted/web.ova")
    answers.set()


def test_a_mount_point_lies_above_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="does not lie beneath mount_point"):
        DirectorySetting(kind="directory", path=tmp_path / "volumes", mount_point=tmp_path / "other")


# It loads a module and numpy, and says how many threads there are.
_THREADS = """
import importlib, os, sys
importlib.import_module(sys.argv[1])
import numpy
print(len(os.listdir("/proc/self/task")))
"""


def test_numpy_starts_no_threads_where_it_is_loaded() -> None:
    """They are for products of matrices, of which there are none here, and starting them takes longer than all else of it."""
    source = Path(synvirt.__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    packages = {path.parent for path in source.rglob("*.py") if re.search(r"^ *import numpy", path.read_text(), re.MULTILINE)}
    assert packages
    for package in packages:
        name = ".".join(package.relative_to(source.parent).parts)
        done = subprocess.run(
            [sys.executable, "-c", _THREADS, name], env=environment, capture_output=True, text=True, timeout=60
        )
        assert (name, done.stdout) == (name, "1\n"), done.stderr


def test_who_cannot_listen_has_changed_nothing_and_shown_no_password(tmp_path: Path) -> None:
    """The password of the first start is shown once, and would be lost among the lines of the failure."""
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = Settings(data_dir=tmp_path, listen=f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(Conflict, match="in use by another program"), service(settings, announce=lines.append):
            pytest.fail("it serves")
    assert lines == []
    assert not (tmp_path / "keyring/users").exists()
    assert list(tmp_path.glob("migrator.db*")) == []
    assert not settings.socket_path.exists()


def test_a_start_removes_the_temporary_folders_of_killed_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.doctor.Checkup.begin", lambda self: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp/synvirt-v2v-ab12_d9z.held/in").mkdir(parents=True)
    with scratch_folder("look") as used, service(Settings(data_dir=tmp_path / "data", listen="127.0.0.1:0"), announce=print):
        assert [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("synvirt-")] == [used]


def test_what_ended_long_ago_goes_by_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.doctor.Checkup.begin", lambda self: None)
    settings = Settings(data_dir=tmp_path / "data", listen="127.0.0.1:0", keep_ended_days=30)
    prepare_data_dir(settings)
    store, host, stay = Store(settings.store_url), settings.host_id, set()
    for days in (40, 20):
        ended = now() - timedelta(days=days)
        job = migration(state=State.CANCELLED, created_at=ended, finished_at=ended)
        run = BackupRun(id=uuid4(), status=Status.COMPLETED, created_at=ended, finished_at=ended)
        store.add(job, host=host)
        store.backups.put("run", run.id, run, host=host, state=str(run.status))
        stay = {str(job.id), str(run.id)}

    def there() -> set[str]:
        documents = (*store.documents(limit=9)[0], *store.backups.all("run", host=host))
        return {json.loads(one)["id"] for one in documents}

    assert len(there()) == 4
    with service(settings, announce=print):
        until(lambda: there() == stay)
    store.close()


def test_without_the_setting_nothing_goes() -> None:
    asked: list[float] = []
    with retained(asked.append, 0):
        pass
    assert asked == []


# A service that breaks while one of its threads waits.
_BREAKS = """
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from synvirt.main import commands

@contextmanager
def service(settings, *, announce):
    ThreadPoolExecutor(1).submit(Event().wait, 600)
    raise RuntimeError("an error of the service")
    yield

commands.service = service
sys.argv = ["synvirt", "serve", "--data-dir", sys.argv[1]]
commands.main()
"""


def test_a_service_that_breaks_ends_at_once(tmp_path: Path) -> None:
    """Else its supervisor takes it for one that runs, until the last step in a thread has seen its guest boot."""
    argv = [sys.executable, "-c", _BREAKS, str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=40, check=False)
    assert ended.returncode == 1
    assert "RuntimeError: an error of the service" in ended.stderr
