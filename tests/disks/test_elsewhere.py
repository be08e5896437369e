"""Which disks are served from elsewhere, whatever lies over them: copying one is mostly waiting."""

import pytest

from synvirt.disks.specs import ChangedSpec, ImageSpec, LeaseSpec, NbdSpec, RawSpec, ReaderSpec, elsewhere
from synvirt.remote import Remote

FILE = RawSpec(path="/images/a.vmdk")
SERVED = RawSpec(path="a.vmdk", remote=Remote(url="https://images.example/"))
EXPORT = NbdSpec(uri="nbd://host/export")
LEASE = LeaseSpec(host="host", target="/nfc/a", size_bytes=1)


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        (FILE, False),
        (SERVED, False),
        (EXPORT, True),
        (LEASE, True),
        (ImageSpec(format="vmdk", over=FILE), False),
        (ImageSpec(format="vmdk", over=SERVED), False),
        (ChangedSpec(over=EXPORT, areas=((0, 1),)), True),
        (ChangedSpec(over=FILE, areas=((0, 1),)), False),
    ],
)
def test_a_disk_that_is_served_when_asked_is_elsewhere(spec: ReaderSpec, *, answer: bool) -> None:
    assert elsewhere(spec) is answer
