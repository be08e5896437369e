"""How a guest gets onto its volume, with a domain that the test plays. tests/real/hypervisor has a real one."""

from typing import NoReturn

import pytest

from synvirt.errors import DiskWriteFailed
from synvirt.hypervisor import Early, Volume
from synvirt.hypervisor.early import onto_volume
from synvirt.kvm.connection import load

VOLUME = Volume("disk-0", "/volume", "file", Early("/top", "/between", "/socket"))


class Lost:
    """A domain of a libvirtd that was restarted: each call fails, and so does the look whether it runs."""

    def isActive(self) -> NoReturn:  # noqa: N802 - libvirt's own
        raise load().libvirtError("client socket is closed")


def test_a_connection_that_is_lost_is_an_error_of_ours() -> None:
    with pytest.raises(DiskWriteFailed, match="disk-0 does not get onto its volume") as caught:
        onto_volume(Lost, VOLUME, lambda path: None, lambda: False)
    assert "tried again" in (caught.value.hint or "")
