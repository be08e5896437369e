"""The reader of a lease's stream: the laws of readers, and streams that do not come or end early."""

from dataclasses import replace
from pathlib import Path

import pytest

from synvirt.disks import open_reader
from synvirt.disks.specs import LeaseSpec, RawSpec
from synvirt.errors import (
    DiskReadFailed,
    MalformedArchive,
    SourceUnreachable,
)
from tests.contracts.live import read
from tests.contracts.readers import ReaderCase, ReaderContract
from tests.fakes.vcenter import DISK_BYTES, VCenter

pytestmark = pytest.mark.timeout(600)


class TestReader(ReaderContract):
    @pytest.fixture(params=["lease", "lease, then a file"])
    def case(
        self,
        request: pytest.FixtureRequest,
        platform: VCenter,
        spec: LeaseSpec,
        disk: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> ReaderCase:
        # What is lost lies in the middle, and not in the first that is fetched.
        monkeypatch.setattr("synvirt.disks.vsphere.exported._BUFFER_BYTES", 4096)
        if request.param == "lease":
            return ReaderCase(open=lambda: open_reader(spec), content=disk.read_bytes())
        platform.fault("nfc", "cut", times=1000)
        either = replace(spec, instead=RawSpec(path=str(disk)))
        return ReaderCase(open=lambda: open_reader(either), content=disk.read_bytes())


def test_what_neither_way_reads_is_reported(
    platform: VCenter, spec: LeaseSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synvirt.disks.vsphere.exported._BUFFER_BYTES", 4096)
    platform.fault("nfc", "cut")
    reader = open_reader(replace(spec, instead=RawSpec(path=str(tmp_path / "none"))))
    reader.read_into(0, memoryview(bytearray(4096)))
    with pytest.raises(DiskReadFailed, match="none"):
        reader.read_into(4096, memoryview(bytearray(reader.size - 4096)))
    for _ in range(2):
        reader.close()


@pytest.mark.parametrize(("kind", "error"), [("refuse", SourceUnreachable), ("cut", SourceUnreachable),
                                             ("empty", DiskReadFailed), ("page", MalformedArchive),
                                             ("status:503", SourceUnreachable), ("status:404", SourceUnreachable),
                                             ("status:403", DiskReadFailed)])  # fmt: skip
def test_a_stream_that_does_not_come_or_ends_early(
    platform: VCenter, spec: LeaseSpec, kind: str, error: type[Exception]
) -> None:
    platform.fault("nfc", kind)
    with pytest.raises(error):
        read(spec)


def test_a_host_with_another_certificate_is_sent_nothing(platform: VCenter, spec: LeaseSpec) -> None:
    platform.control("certificate")
    before = platform.calls("nfc")
    for one in (spec, replace(spec, fingerprint_sha256=None)):
        with pytest.raises(SourceUnreachable, match="is not the pinned one"):
            open_reader(one)
    assert platform.calls("nfc") == before


def test_a_host_is_known_by_the_thumbprint_of_its_platform(spec: LeaseSpec, disk: Path) -> None:
    assert spec.thumbprint is not None
    assert read(replace(spec, fingerprint_sha256=None, verify_tls=True))[0] == disk.read_bytes()
    with pytest.raises(SourceUnreachable, match="not trusted"):
        open_reader(replace(spec, fingerprint_sha256=None, thumbprint=None, verify_tls=True))


def test_what_lies_before_a_watermark_is_passed_over(spec: LeaseSpec, disk: Path) -> None:
    reader = open_reader(spec)
    start = (1 << 20) + 70_050
    buffer = bytearray(DISK_BYTES - start)
    reader.read_into(start, memoryview(buffer))
    assert buffer == disk.read_bytes()[start:]
    with pytest.raises(DiskReadFailed, match="passed already"):
        reader.read_into(0, memoryview(bytearray(1)))
    reader.close()
