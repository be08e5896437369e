"""Which disks lie elsewhere, whatever lies over them: whoever copies one waits more than it works."""

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
        (SERVED, True),
        (EXPORT, True),
        (LEASE, True),
        (ImageSpec(format="vmdk", over=FILE), False),
        (ImageSpec(format="vmdk", over=SERVED), True),
        (ImageSpec(format="vmdk", over=FILE, parent=ImageSpec(format="vmdk", over=SERVED)), True),
        (ChangedSpec(over=EXPORT, areas=((0, 1),)), True),
        (ChangedSpec(over=FILE, areas=((0, 1),)), False),
    ],
)
def test_a_disk_is_elsewhere_if_any_part_of_it_is(spec: ReaderSpec, *, answer: bool) -> None:
    assert elsewhere(spec) is answer
