"""A whole import into a real Ceph cluster: the guest boots from its image there, by the whole service and real QEMU."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.sample import Sample
from tests.needs import need
from tests.running import forked
from tests.servers import ceph


@pytest.fixture
def conf() -> Iterator[Path]:
    with ceph.cluster() as path:
        yield path


@pytest.mark.timeout(600)
def test_a_guest_boots_from_its_image_in_the_pool(tmp_path: Path, conf: Path, sample: Sample) -> None:
    need("qemu-system-x86_64", "qemu-system-x86")
    data_dir = tmp_path / "data"
    (data_dir / "imports").mkdir(parents=True)
    os.link(sample.ova, data_dir / "imports" / "sample.ova")
    config = tmp_path / "synvirt.toml"
    config.write_text(f'destination = "ceph"\n[destinations.ceph]\nkind = "rbd"\npool = "{ceph.POOL}"\nconf = "{conf}"\n')
    plan = {
        "source": {"Offline": "ova_archive"},
        "source_ref": {"kind": "offline_host_path", "path": "sample.ova"},
        "mode": "Cold",
    }
    done = forked.run(
        [sys.executable, "-m", "tests.real.one_job", str(data_dir)],
        input=json.dumps(plan),
        env={**os.environ, "SYNVIRT_CONFIG": str(config)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    job = answer["job"]
    assert job["state"] == "Completed", job["last_error"]
    assert (job["boot_sign"], answer["id"]) == ("agent", sample.id)
    assert "protocol='rbd'" in job["domain"]["xml"].replace('"', "'")
    # one_job removed the guest and its volume.
    assert ceph.rbd(conf, "ls").split() == []
    assert list((data_dir / "volumes").iterdir()) == []
