"""A reader that is taken over, in the copy worker of a whole service: each thing that it tries fails, and with it the job, by a
code; the service answers all the while, and the next job brings its disk home.

Nothing of the product is made for this: a `sitecustomize` of the test, which Python reads at its start, puts the misbehaviour
into the reader of a worker, behind the cage, where an image that took it over would be."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.cli.client import Client
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from tests.cage.test_cage import needs
from tests.real.test_service import service
from tests.running.processes import until, workers

DENIED, BROKE = "PermissionError", "E_MIG_INTERNAL"
STALLED_S = 3
# By the name of the image: what its reader does, the code of the job, and words of its cause.
MISBEHAVIOUR = {
    "opens-shadow": ("open('/etc/shadow').read()", BROKE, DENIED),
    "looks-for-other-volumes": ("os.listdir(data + '/volumes')", BROKE, DENIED),
    "writes-its-source": ("open(path, 'r+b')", BROKE, DENIED),
    "opens-the-store": ("open(data + '/migrator.db', 'rb').read(1)", BROKE, DENIED),
    "connects-out": ("socket.create_connection(('127.0.0.1', {port}), 5)", BROKE, DENIED),
    "asks-the-service": ("socket.socket(socket.AF_UNIX).connect(data + '/synvirt.sock')", BROKE, DENIED),
    "forks": ("os.fork()", BROKE, DENIED),
    "runs-a-program": ("subprocess.run(['/bin/true'])", BROKE, DENIED),
    "ends-the-service": ("os.kill(os.getppid(), 9)", BROKE, DENIED),
    "takes-16-gib": ("bytearray(16 << 30)", "E_MIG_DISK_READ_FAILED", "more memory"),
    "loops": ("[None for _ in iter(int, 1)]", "E_MIG_DISK_READ_FAILED", f"nothing for {STALLED_S} s"),
}
SITE = """
import os, sys
if "synvirt.worker" in sys.orig_argv:
    import socket, subprocess
    import synvirt.disks
    does, opened = {does!r}, synvirt.disks.open_reader

    def open_reader(spec, *more):
        reader = opened(spec, *more)
        path = next((path for path in (getattr(getattr(spec, "over", spec), "path", ""),) if path), "")
        name = os.path.basename(path).removesuffix(".qcow2")
        if name not in does:
            return reader

        class TakenOver:
            size, max_readers = reader.size, reader.max_readers
            extents, close = reader.extents, reader.close

            def read_into(self, offset, buffer):
                eval(does[name], globals() | {{"path": path, "data": {data!r}}})
                reader.read_into(offset, buffer)

        return TakenOver()

    synvirt.disks.open_reader = open_reader
"""
# An image's data is what is looked for, so it has some.
IMAGE_BYTES = 4 << 20


class Running:
    def __init__(self, data_dir: Path, process: "subprocess.Popen[bytes]", client: Client, listener: socket.socket) -> None:
        self.data_dir, self.process, self.client, self.listener = data_dir, process, client, listener

    def submit(self, name: str) -> Migration:
        path = self.data_dir / "imports" / f"{name}.qcow2"
        raw = self.data_dir.parent / f"{name}.raw"
        raw.write_bytes(os.urandom(IMAGE_BYTES))
        subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(path)], check=True)
        fields = {
            "source": {"Offline": "qcow2"},
            "source_ref": {"kind": "offline_host_path", "path": str(path)},
            "mode": "Cold",
            "target": {"start": False},
        }
        return self.client.submit(MigrationPlan.model_validate(fields))

    def ended(self, job: Migration) -> Migration:
        """It answers all the while."""
        until(lambda: self.client.migration(job.id).ended, 120)
        assert self.process.poll() is None
        return self.client.migration(job.id)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    needs("landlock", "seccomp")
    folder = tmp_path_factory.mktemp("misbehaving")
    data_dir = folder / "data"
    (data_dir / "imports").mkdir(parents=True)
    (folder / "site").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.MonkeyPatch.context() as patched:
        listener.setblocking(False)
        does = {name: what.replace("{port}", str(listener.getsockname()[1])) for name, (what, _, _) in MISBEHAVIOUR.items()}
        (folder / "site" / "sitecustomize.py").write_text(SITE.format(does=does, data=str(data_dir)))
        patched.setenv("PYTHONPATH", str(folder / "site"))
        patched.setenv("SYNVIRT_COPY_STALLED_S", str(STALLED_S))
        with service(data_dir) as (process, client):
            yield Running(data_dir, process, client, listener)


@pytest.mark.slow
@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_its_job_fails_by_a_code_and_the_next_one_works(name: str, running: Running) -> None:
    _, code, words = MISBEHAVIOUR[name]
    last = running.ended(running.submit(name))
    assert (last.state, last.last_error and last.last_error.code) == (State.FAILED, code), last.last_error
    assert last.last_error is not None
    assert words in last.last_error.message
    assert list((running.data_dir / "volumes").rglob(f"*{name}*")) == [], "what it had copied is gone"
    assert workers(running.process.pid) == []
    assert running.process.poll() is None
    good = running.ended(running.submit(f"good-after-{name}"))
    assert good.state == State.COMPLETED, good.last_error
    [volume] = (running.data_dir / "volumes").rglob(f"*good-after-{name}*.raw")
    assert volume.read_bytes() == (running.data_dir.parent / f"good-after-{name}.raw").read_bytes()
    with pytest.raises(BlockingIOError):
        running.listener.accept()
