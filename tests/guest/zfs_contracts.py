"""The laws of a destination and of a writer, on real zfs volumes."""

from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.destinations.zfs import ZfsDestination
from synvirt.disks import open_writer
from tests.contracts.destinations import SIZE, DestinationCase, DestinationContract
from tests.contracts.writers import WriterCase, WriterContract
from tests.guest.zvols import POOL, new_destination, root, volumes


class TestDestination(DestinationContract):
    @pytest.fixture
    def case(self) -> DestinationCase:
        destination = new_destination()
        namespace = root(destination).removeprefix(f"{POOL}/").removesuffix("/migrations")
        return DestinationCase(
            destination=destination,
            another=lambda: ZfsDestination(POOL, namespace),
            volumes=lambda: volumes(destination, "volume"),
        )


@pytest.fixture(scope="module")
def destination() -> ZfsDestination:
    """Each of its datasets takes a second to make: what lies beside the volume is nothing to a writer."""
    return new_destination()


class TestWriter(WriterContract):
    @pytest.fixture
    def case(self, destination: ZfsDestination) -> WriterCase:
        volume = destination.volume_name(uuid4(), "Hard disk 1")
        destination.create(volume, SIZE)
        return WriterCase(
            open=lambda: open_writer(destination.open(volume, SIZE)),
            content=lambda: Path(destination.device(volume)).read_bytes(),
        )
