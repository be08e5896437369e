"""Volumes as images in the pool of a real Ceph cluster."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.destinations.rbd import RbdDestination
from synvirt.disks.specs import RbdPlace
from synvirt.errors import DiskWriteFailed
from tests.contracts.destinations import DestinationCase, DestinationContract
from tests.servers import ceph

# A cluster takes 12 s to come up on an idle machine.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def conf() -> Iterator[Path]:
    with ceph.cluster() as path:
        yield path


class TestDestination(DestinationContract):
    @pytest.fixture
    def case(self, conf: Path) -> DestinationCase:
        place = RbdPlace(conf=str(conf), client="admin", pool=ceph.POOL)
        for image in ceph.rbd(conf, "ls").split():
            ceph.rbd(conf, "rm", image)
        return DestinationCase(
            destination=RbdDestination(place),
            another=lambda: RbdDestination(place),
            volumes=lambda: ceph.rbd(conf, "ls").split(),
        )


def test_a_domain_gets_a_path_with_a_colon_in_it() -> None:
    place = RbdPlace(conf="/etc/ceph/a:b.conf", client="libvirt", pool="vms")
    destination = RbdDestination(place)
    name = destination.volume_name(uuid4(), "disk")
    assert destination.device(name) == rf"rbd:vms/{name}:id=libvirt:conf=/etc/ceph/a\:b.conf"


@pytest.mark.parametrize("change", [{"pool": "a/b"}, {"pool": ""}, {"client": "x:conf=/etc"}, {"pool": "a@b"}])
def test_names_that_would_need_quoting_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(DiskWriteFailed, match="is not a name"):
        RbdDestination(RbdPlace(**{"conf": "/etc/ceph/ceph.conf", "client": "admin", "pool": "vms", **change}))
