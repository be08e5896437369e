"""libvirt opens one embedded driver a process: all tests that need one in this process share its folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.kvm.connection import load
from synvirt.sample import Sample, build
from synvirt.settings import Settings
from tests.needs import need
from tests.running.shared import of_all_workers


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


# What builds a sample, and what runs it.
SAMPLE_PROGRAMS = {
    "syslinux": "syslinux",
    "mcopy": "mtools",
    "mke2fs": "e2fsprogs",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
}


def built_once(tmp_path_factory: pytest.TempPathFactory, payload_mib: int) -> Sample:
    """A sample for all tests of a run, none of which writes to its files: to build it takes two seconds of a core."""
    for program, package in SAMPLE_PROGRAMS.items():
        need(program, package)
    with of_all_workers(tmp_path_factory, "sample.lock") as around:
        folder = around / f"sample-{payload_mib}"
        known = folder / "id"
        if not known.exists():
            known.write_text(build(folder, payload_mib=payload_mib, keep_raw=True).id)
        (ova,), (raw,) = folder.glob("*.ova"), folder.glob("*.raw")
        return Sample(ova, known.read_text(), raw.stat().st_size, raw)


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return built_once(tmp_path_factory, 8)


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
