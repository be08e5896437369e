"""One libvirt host for all tests of this folder, and a running domain on it."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.libvirt_lab import LibvirtLab, lab


@pytest.fixture(scope="package")
def host() -> Iterator[LibvirtLab]:
    with lab() as running:
        yield running


@pytest.fixture
def domain(host: LibvirtLab) -> Any:
    """It runs, from one qcow2 disk of 8 MiB."""
    made = host.domain(host.disk("8M"))
    made.create()
    return made
