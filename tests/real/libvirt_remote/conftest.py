"""One libvirt host for all tests of this folder, and a running domain on it."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.libvirt_lab import LibvirtLab, lab


@pytest.fixture(scope="package")
def host() -> Iterator[LibvirtLab]:
    with lab(boots=True) as running:
        yield running


@pytest.fixture
def domain(host: LibvirtLab) -> Iterator[Any]:
    """It runs, from one qcow2 disk of 8 MiB."""
    made = host.domain(host.disk("8M"))
    made.create()
    yield made
    # Emulated, it takes some thousandths of a core even where it does nothing.
    host.kill_all()
