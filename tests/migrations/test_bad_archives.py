"""Archives as they arrive broken or hostile, given to the whole product: its importers, workers and volumes.

Each ends with its code, a cause and a hint, and nothing of the job is left.
"""

import os
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from synvirt.errors import SynvirtError
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from tests.house import House, offline_plan
from tests.offline.appliances import archive, manifest, raw_disk, stream_vmdk

NAME = "appliance"
OVF = (Path(__file__).parent / "one_disk.ovf").read_bytes()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, real_importers=True)
    yield house
    house.close()


@pytest.fixture(scope="module")
def vmdk(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return stream_vmdk(tmp_path_factory.mktemp("vmdk"), "disk1.vmdk", raw_disk()).read_bytes()


def files_of(ovf: bytes, vmdk: bytes) -> dict[str, bytes]:
    files = {f"{NAME}.ovf": ovf, "disk1.vmdk": vmdk}
    return {f"{NAME}.ovf": ovf, f"{NAME}.mf": manifest(files), "disk1.vmdk": vmdk}


def import_(house: House, path: Path) -> Migration | SynvirtError:
    """The job's end; or what the plan was refused with at once."""
    try:
        job = house.intake.submit(offline_plan(path, kind="ova_archive"))
    except SynvirtError as error:
        return error
    return house.run(job.id)


def assert_refused(house: House, ended: Migration | SynvirtError, code: str, *words: str) -> None:
    if isinstance(ended, SynvirtError):
        found_code, message = ended.code, ended.detail
        assert house.store.documents(limit=10)[0] == []
    else:
        assert ended.state == State.FAILED
        assert ended.last_error is not None
        found_code, message = ended.last_error.code, ended.last_error.message
        assert house.store.ledger(ended.id) == []
    assert found_code == code, message
    for word in words:
        assert word in message
    assert house.leftovers() == []


def test_a_good_archive_arrives_byte_for_byte(house: House, vmdk: bytes) -> None:
    ended = import_(house, archive(house.imports / "a.ova", files_of(OVF, vmdk)))
    assert isinstance(ended, Migration)
    assert ended.state == State.COMPLETED, ended.last_error
    assert house.volume(ended, ended.disks[0].key).read_bytes() == raw_disk()


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_archive(house: House, vmdk: bytes, part: float) -> None:
    path = archive(house.imports / "a.ova", files_of(OVF, vmdk))
    os.truncate(path, int((path.stat().st_size - 10240) * part))
    assert_refused(house, import_(house, path), "E_MIG_MALFORMED_ARCHIVE")


def test_a_wrong_checksum_of_the_disk_is_found_in_the_pass(house: House, vmdk: bytes) -> None:
    files = files_of(OVF, vmdk)
    files[f"{NAME}.mf"] = manifest({f"{NAME}.ovf": OVF, "disk1.vmdk": vmdk + b"!"})
    path = archive(house.imports / "a.ova", files)
    assert_refused(house, import_(house, path), "E_MIG_MALFORMED_ARCHIVE", "disk1.vmdk", "SHA256")


def test_a_wrong_checksum_of_the_description(house: House, vmdk: bytes) -> None:
    files = files_of(OVF, vmdk)
    files[f"{NAME}.mf"] = manifest({f"{NAME}.ovf": OVF + b" ", "disk1.vmdk": vmdk})
    path = archive(house.imports / "a.ova", files)
    assert_refused(house, import_(house, path), "E_MIG_MALFORMED_ARCHIVE", f"{NAME}.ovf")


def test_a_flipped_bit_in_the_disk_is_found(house: House, vmdk: bytes) -> None:
    flipped = bytearray(vmdk)
    flipped[len(vmdk) // 2] ^= 0x10
    files = files_of(OVF, vmdk) | {"disk1.vmdk": bytes(flipped)}
    path = archive(house.imports / "a.ova", files)
    ended = import_(house, path)
    assert isinstance(ended, Migration)
    assert ended.last_error is not None
    assert_refused(house, ended, ended.last_error.code, "disk")
    assert ended.last_error.code in ("E_MIG_MALFORMED_ARCHIVE", "E_MIG_DISK_READ_FAILED")


# The header's fields that say in which sectors the two grain directories lie; QEMU writes the tables at the front.
REDUNDANT_FIELD, DIRECTORY_FIELD = 48, 56


def _tables_outside(vmdk: bytes) -> bytes:
    """Both grain directories moved beyond the end of the file: with one of them whole the disk could still be read."""
    lying = bytearray(vmdk)
    assert lying[:4] == b"KDMV"
    for field in (REDUNDANT_FIELD, DIRECTORY_FIELD):
        struct.pack_into("<Q", lying, field, len(vmdk))
    return bytes(lying)


def _grain_outside(vmdk: bytes) -> bytes:
    """The first used entry of the first grain table, pointing a terabyte on."""
    lying = bytearray(vmdk)
    directory = struct.unpack_from("<Q", lying, DIRECTORY_FIELD)[0] * 512
    table = struct.unpack_from("<I", lying, directory)[0] * 512
    used = next(at for at in range(table, table + 2048, 4) if struct.unpack_from("<I", lying, at)[0] > 1)
    struct.pack_into("<I", lying, used, 0x7FFFFFFF)
    return bytes(lying)


@pytest.mark.parametrize("lie", [_tables_outside, _grain_outside])
def test_a_vmdk_whose_tables_point_outside_the_file(house: House, vmdk: bytes, lie: Callable[[bytes], bytes]) -> None:
    path = archive(house.imports / "a.ova", files_of(OVF, lie(vmdk)))
    ended = import_(house, path)
    # What the image's own header shows refuses the plan; what a table shows is found by the copy.
    code = ended.code if isinstance(ended, SynvirtError) else ended.last_error.code if ended.last_error else ""
    assert code in ("E_MIG_MALFORMED_ARCHIVE", "E_MIG_DISK_READ_FAILED")
    assert_refused(house, ended, code)


LAUGHS = b'<!DOCTYPE l [<!ENTITY a "ha">' + b"".join(
    b'<!ENTITY %c "&%c;&%c;&%c;&%c;&%c;&%c;&%c;&%c;&%c;&%c;">' % (98 + n, *[97 + n] * 10) for n in range(20)
)
XML_ATTACKS = {
    "a billion laughs": LAUGHS + b"]>",
    "an external entity": b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]>',
    "a document type of its own": b'<!DOCTYPE x SYSTEM "http://192.0.2.1/x.dtd">',
}


@pytest.mark.parametrize("attack", XML_ATTACKS)
def test_an_ovf_with_entities(house: House, vmdk: bytes, attack: str) -> None:
    declaration, rest = OVF.split(b"?>", 1)
    ovf = (
        declaration + b"?>" + XML_ATTACKS[attack] + rest.replace(b"appliance", b"&u;" if b"laughs" in attack.encode() else b"x")
    )
    path = archive(house.imports / "a.ova", files_of(ovf, vmdk))
    assert_refused(house, import_(house, path), "E_MIG_MALFORMED_ARCHIVE")


@pytest.mark.parametrize("name", ["../disk1.vmdk", "/etc/passwd", "a/../../disk1.vmdk"])
def test_a_member_that_leaves_the_archive(house: House, vmdk: bytes, name: str) -> None:
    path = archive(house.imports / "a.ova", {f"{NAME}.ovf": OVF, name: vmdk})
    assert_refused(house, import_(house, path), "E_MIG_MALFORMED_ARCHIVE")


def test_an_archive_that_is_a_link_out_of_the_import_root(house: House, vmdk: bytes, tmp_path: Path) -> None:
    archive(tmp_path / "outside.ova", files_of(OVF, vmdk))
    (house.imports / "a.ova").symlink_to(tmp_path / "outside.ova")
    assert_refused(house, import_(house, house.imports / "a.ova"), "E_MIG_HOST_PATH_REJECTED")


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside.ova", "folder/../../outside.ova"])
def test_a_path_outside_the_import_root(house: House, path: str) -> None:
    (house.imports / "folder").mkdir()
    (house.folder / "outside.ova").touch()
    assert_refused(house, import_(house, Path(path)), "E_MIG_HOST_PATH_REJECTED")


def test_an_archive_that_is_not_there(house: House) -> None:
    assert_refused(house, import_(house, house.imports / "none.ova"), "E_MIG_NOT_FOUND", "none.ova")


def test_a_file_of_no_known_kind(house: House) -> None:
    path = house.imports / "a.ova"
    path.write_bytes(b"these are not the bytes you are looking for" * 100)
    assert_refused(house, import_(house, path), "E_MIG_UNSUPPORTED_FORMAT", "a.ova")


def test_a_tar_without_a_description(house: House, vmdk: bytes) -> None:
    path = archive(house.imports / "a.ova", {"disk1.vmdk": vmdk}, tarfile.PAX_FORMAT)
    ended = import_(house, path)
    code = ended.code if isinstance(ended, SynvirtError) else ended.last_error.code if ended.last_error else ""
    assert code in ("E_MIG_MALFORMED_ARCHIVE", "E_MIG_UNSUPPORTED_FORMAT")
    assert_refused(house, ended, code)
