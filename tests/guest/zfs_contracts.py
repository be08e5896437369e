"""The laws of a destination and of a writer, on real zfs volumes."""

from uuid import uuid4

import pytest

from synvirt.destinations.zfs import ZfsDestination
from synvirt.disks import open_writer
from tests.contracts.destinations import SIZE, DestinationCase, DestinationContract
from tests.contracts.writers import WriterCase, WriterContract
from tests.guest.zvols import POOL, content, new_destination, root, volumes


@pytest.fixture(scope="module")
def destination() -> ZfsDestination:
    """Each of its datasets takes a second to make: what other jobs have beside its own is nothing to a test."""
    return new_destination()


class TestDestination(DestinationContract):
    @pytest.fixture
    def case(self, request: pytest.FixtureRequest, destination: ZfsDestination) -> DestinationCase:
        if request.function.__name__ == self.test_jobs_make_volumes_at_the_same_time.__name__:
            destination = new_destination()  # all that is above their volumes, too
        namespace = root(destination).removeprefix(f"{POOL}/").removesuffix("/migrations")
        # What is refused by its name makes none, and a look takes half a second here.
        before = set() if "name" in request.fixturenames else set(volumes(destination, "volume"))
        return DestinationCase(
            destination=destination,
            another=lambda: ZfsDestination(POOL, namespace),
            volumes=lambda: [name for name in volumes(destination, "volume") if name not in before],
        )


class TestWriter(WriterContract):
    @pytest.fixture
    def case(self, destination: ZfsDestination) -> WriterCase:
        volume = destination.volume_name(uuid4(), "Hard disk 1")
        destination.create(volume, SIZE)
        return WriterCase(
            open=lambda: open_writer(destination.open(volume, SIZE)),
            content=lambda: content(destination.device(volume)),
        )
