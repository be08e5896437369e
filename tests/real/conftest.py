"""libvirt opens one embedded driver a process: all tests that need one in this process share its folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.kvm.connection import load
from synvirt.settings import Settings
from tests.needs import need


@pytest.fixture(scope="session", autouse=True)
def _no_links_left() -> Iterator[None]:
    """Where a data_dir was gone with its test, the short link to it is of no use."""
    yield
    for link in Path("/run").glob("sv-*"):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)


def passable() -> tempfile.TemporaryDirectory[str]:
    """pytest's own are shut to all but root, and then guests would run as root."""
    made = tempfile.TemporaryDirectory(prefix="synvirt-real-", ignore_cleanup_errors=True)
    Path(made.name).chmod(0o711)
    return made


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with passable() as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def data_dir() -> Iterator[Path]:
    """Long, and of odd characters, as a data_dir may be: libvirt's sockets must come to lie in shorter paths."""
    need("qemu-system-x86_64", "qemu-system-x86")
    with passable() as folder:
        yield Path(folder) / "a-data-dir-with-quite-a-long-name" / "and spaces & more"


@pytest.fixture
def host(data_dir: Path) -> Iterator[LibvirtHost]:
    host = LibvirtHost(Settings(data_dir=data_dir).hypervisor_uri, data_dir)
    yield host
    libvirt = load()
    whole = libvirt.VIR_DOMAIN_UNDEFINE_NVRAM | libvirt.VIR_DOMAIN_UNDEFINE_TPM  # what one test left fails no other
    for domain in host._connection.use().listAllDomains():
        if domain.isActive():
            domain.destroy()
        domain.undefineFlags(whole)
    host.close()
