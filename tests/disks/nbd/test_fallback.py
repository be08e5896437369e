"""What only QEMU reads is opened by QEMU, by itself: on the command line and by the importers. Nothing else is."""

import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from synvirt.disks import detect, open_reader
from synvirt.disks.nbd.fallback import MAGICS, driver_of, passphrase, readable, with_key
from synvirt.disks.nbd.qemu import DRIVERS
from synvirt.disks.raw.files import RawReader
from synvirt.disks.specs import GzipSpec, ImageSpec, QemuSpec, RawSpec
from synvirt.errors import BadRequest, HostPathRejected, MalformedArchive, UnsupportedFormat
from synvirt.offline.registry import detect as detect_importer
from synvirt.offline.single import disk as single_disk
from tests.cli.disk.program import disk
from tests.contracts.readers import read_all
from tests.disks.block_images import qemu
from tests.disks.luks_images import luks_image, luks_in_qcow2

MIB = 1 << 20
KEY = "open, sesame"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the disk that all images here have, and with each of these, made once."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "disk.raw").write_bytes(b"boot" + os.urandom(200_000) + bytes(2 * MIB) + os.urandom(3 * MIB - 200_004))
    (folder / "key").write_text(KEY)
    return folder


@pytest.fixture
def raw(shared: Path, tmp_path: Path) -> Path:
    for name in ("disk.raw", "key"):
        shutil.copy(shared / name, tmp_path)
    return tmp_path / "disk.raw"


Make = Callable[..., Path]


@pytest.fixture
def made(shared: Path, raw: Path) -> Make:
    """Makes an image of the disk, beside it: of a driver, with options."""

    def image(name: str, driver: str, options: str = "") -> Path:
        kept = f"{driver} {options}".strip()
        if not (shared / kept).exists() and driver in LUKS:
            LUKS[driver](shared / kept, shared / "disk.raw", shared / "key")
        elif not (shared / kept).exists():
            option = ["-o", options] if options else []
            secret = ["--object", "secret,id=s,file=key"]
            qemu("qemu-img", "convert", *secret, "-f", "raw", "-O", driver, *option, "disk.raw", kept, cwd=shared)
        return Path(shutil.copy(shared / kept, raw.with_name(name)))

    return image


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short names for sockets (see test_qemu_nbd), and nothing left behind."""
    with tempfile.TemporaryDirectory(prefix="fb-", dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield
        assert list(Path(folder).iterdir()) == []


LUKS = {"luks in qcow2": luks_in_qcow2, "luks": luks_image}
ENCRYPTED = {
    "luks in qcow2": ("luks in qcow2", ""),
    "aes in qcow2": ("qcow2", "encrypt.format=aes,encrypt.key-secret=s"),
    "aes in qcow": ("qcow", "encrypt.format=aes,encrypt.key-secret=s"),
    "luks": ("luks", ""),
}


@pytest.mark.parametrize("driver", ["qed", "parallels", "qcow"])
def test_an_exotic_image_is_converted_like_any_other(made: Make, raw: Path, driver: str, tmp_path: Path) -> None:
    image = made("image", driver)
    [described] = json.loads(disk("info", "--json", image).stdout)["disks"]
    assert described["format"] == driver
    assert described["read_by"].startswith("qemu-nbd")
    result = disk("convert", "--verify", image, tmp_path / "target.raw")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "target.raw").read_bytes().rstrip(b"\0") == raw.read_bytes().rstrip(b"\0")
    assert disk("compare", image, raw).exit_code == 0


@pytest.mark.parametrize("way", ENCRYPTED)
def test_an_encrypted_image_is_converted_with_its_key_file(made: Make, raw: Path, way: str, tmp_path: Path) -> None:
    image = made("image", *ENCRYPTED[way])
    key = tmp_path / "typed"
    key.write_text(KEY + "\n")  # as `echo` and editors leave it
    target = tmp_path / "target.raw"
    result = disk("convert", "--key-file", key, image, target)
    assert result.exit_code == 0, result.output
    assert target.read_bytes() == raw.read_bytes()
    reported = disk("info", "--key-file", key, image).stdout
    rows = [line.split() for line in reported.splitlines()]
    assert ("encryption" in [name for name, *_ in filter(None, rows)]) == (way != "aes in qcow")
    assert ["read_by", "qemu-nbd:"] in [row[:2] for row in rows]
    assert KEY not in reported
    assert disk("compare", "--key-file", key, image, raw).exit_code == 0


@pytest.mark.parametrize("way", ["luks in qcow2", "aes in qcow2", "aes in qcow"])
def test_without_its_key_it_is_refused_and_described(made: Make, raw: Path, way: str, tmp_path: Path) -> None:
    image = made("image", *ENCRYPTED[way])
    result = disk("convert", image, tmp_path / "target.raw")
    assert result.exit_code == 1
    assert result.stderr.startswith("E_MIG_UNSUPPORTED_FORMAT: image is encrypted, and its passphrase is not given\nhint: ")
    assert "--key-file" in result.stderr
    assert not (tmp_path / "target.raw").exists()
    if way != "aes in qcow":
        [described] = json.loads(disk("info", "--json", image).stdout)["disks"]
        assert described["size_bytes"] == raw.stat().st_size
        assert described["encryption"] == ("LUKS" if "luks" in way else "AES")
        assert "--key-file" in described["locked"]


def test_a_wrong_key_is_said_to_be_wrong(made: Make, tmp_path: Path) -> None:
    image = made("image", *ENCRYPTED["luks in qcow2"])
    (tmp_path / "wrong").write_text("wrong")
    result = disk("convert", "--key-file", tmp_path / "wrong", image, tmp_path / "target.raw")
    assert result.exit_code == 1
    assert "password" in result.stderr.lower()
    assert "wrong" not in result.stderr.replace("Invalid password", "")


def test_a_key_for_what_is_not_encrypted_is_a_mistake(made: Make, raw: Path, tmp_path: Path) -> None:
    result = disk("convert", "--key-file", tmp_path / "key", raw, tmp_path / "target.raw")
    assert result.exit_code == 2
    image = made("image", "qcow2")
    with pytest.raises(BadRequest):
        with_key(detect(image), str(tmp_path / "key"))


def test_a_raw_disk_that_is_a_luks_volume_stays_raw_without_a_key(made: Make, tmp_path: Path) -> None:
    """A guest's own encryption is the guest's."""
    image = made("image", *ENCRYPTED["luks"])
    assert disk("convert", image, tmp_path / "target.raw").exit_code == 0
    assert (tmp_path / "target.raw").read_bytes() == image.read_bytes()
    assert "LUKS" in disk("info", image).stdout


def test_an_importer_takes_the_key_from_beside_the_image(made: Make, raw: Path, tmp_path: Path) -> None:
    root = tmp_path / "imports"
    root.mkdir()
    image = made("image", *ENCRYPTED["luks in qcow2"]).rename(root / "disk.qcow2")
    importer = detect_importer(image, root)
    manifest = importer.inspect(image, root)
    assert [concern.category for concern in manifest.concerns if "passphrase" in concern.assessment + concern.remedy] != []
    (root / "disk.qcow2.key").write_text(KEY)
    manifest = importer.inspect(image, root)
    assert [concern for concern in manifest.concerns if "passphrase" in concern.assessment + concern.remedy] == []
    assert manifest.disks[0].format == "qcow2"
    assert KEY not in manifest.model_dump_json()
    opened = importer.open_disk(image, root, single_disk.DISK_KEY)
    assert KEY not in repr(opened)
    reader = open_reader(opened.reader)
    assert read_all(reader) == raw.read_bytes()
    reader.close()


def test_a_key_file_beside_the_image_may_not_lead_out(made: Make, tmp_path: Path) -> None:
    root = tmp_path / "imports"
    root.mkdir()
    image = made("image", *ENCRYPTED["luks in qcow2"]).rename(root / "disk.qcow2")
    (root / "disk.qcow2.key").symlink_to(tmp_path / "key")
    with pytest.raises(HostPathRejected):
        detect_importer(image, root).open_disk(image, root, single_disk.DISK_KEY)


def test_what_names_other_files_or_is_damaged_is_not_tried_on_qemu(made: Make, raw: Path, tmp_path: Path) -> None:
    option = "encrypt.format=aes,encrypt.key-secret=s"
    secret = ["--object", "secret,id=s,file=key"]
    create = ["create", "-q", *secret, "-f", "qcow2", "-o", option, "-b", str(raw), "-F", "raw", "over", "1M"]
    qemu("qemu-img", *create, cwd=tmp_path)
    spec = with_key(detect(tmp_path / "over"), str(tmp_path / "key"))
    assert isinstance(spec, QemuSpec)
    with pytest.raises(HostPathRejected, match="another file"):
        open_reader(spec)
    plain = made("plain", "qcow2")
    content = bytearray(plain.read_bytes())
    struct.pack_into(">Q", content, 40, 12345)  # its L1 table lies nowhere
    plain.write_bytes(content)
    assert isinstance(detect(plain), ImageSpec)
    with pytest.raises(MalformedArchive):
        open_reader(detect(plain))


CUT = {
    "parallels": ("parallels", "", 1 << 16),
    "qcow": ("qcow", "", 4096),
    "aes in qcow": (*ENCRYPTED["aes in qcow"], 4096),
    "aes in qcow2": (*ENCRYPTED["aes in qcow2"], 1 << 16),
    "qed": ("qed", "", 1 << 16),
}


@pytest.mark.parametrize("way", CUT)
def test_an_image_that_ends_before_its_tables_do_is_refused(made: Make, way: str, tmp_path: Path) -> None:
    """QEMU itself reads what is missing as zeros."""
    driver, options, missing = CUT[way]
    image = made("image", driver, options)
    key: list[str | Path] = ["--key-file", tmp_path / "key"] if options else []
    assert disk("convert", *key, image, tmp_path / "whole.raw").exit_code == 0
    os.truncate(image, image.stat().st_size - missing)
    result = disk("convert", *key, image, tmp_path / "target.raw")
    assert result.exit_code == 1, result.output
    assert not (tmp_path / "target.raw").exists()


@pytest.mark.parametrize("name", ["disk.vhd", "disk.dmg", "disk.vmdk", "disk.qcow2", "disk.vhdx", "disk.vdi"])
def test_a_file_that_lost_the_bytes_of_its_format_is_no_raw_disk(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x" * 4096)
    result = disk("info", tmp_path / name)
    assert result.exit_code == 1
    assert "its content is not" in result.stderr
    assert disk("info", (tmp_path / name).rename(tmp_path / "disk.raw")).exit_code == 0


def test_only_files_can_be_given_to_qemu(made: Make) -> None:
    image = made("image", *ENCRYPTED["luks in qcow2"])
    packed = GzipSpec(over=RawSpec(path=str(image)), size_max_bytes=1 << 30)
    spec = ImageSpec(format="qcow2", over=packed, name="image")
    assert readable(spec) is spec


@pytest.mark.parametrize(("driver", "at", "magic"), MAGICS)
def test_a_magic_is_found(driver: str, at: int, magic: bytes, tmp_path: Path) -> None:
    content = bytearray(4096)
    start = at if at >= 0 else len(content) + at
    content[start : start + len(magic)] = magic
    path = tmp_path / "image"
    path.write_bytes(content)
    reader = RawReader(str(path))
    assert driver_of(reader) == driver
    reader.close()
    assert driver in DRIVERS
    spec = detect(path)
    assert isinstance(spec, QemuSpec)
    with pytest.raises((MalformedArchive, HostPathRejected)):
        open_reader(spec)


def test_a_bochs_image(tmp_path: Path) -> None:
    """QEMU makes none, nor cloop and dmg. One that grows and is empty is simple enough to be written by hand: block/bochs.c."""
    header = bytearray(512)
    struct.pack_into("<32s16s16sI", header, 0, b"Bochs Virtual HD Image", b"Redolog", b"Growing", 0x20000)
    struct.pack_into("<I", header, 68, 512)
    struct.pack_into("<IIIIQ", header, 72, 8, 512, 65536, 0, 512 * 1024)
    (tmp_path / "disk.bochs").write_bytes(bytes(header) + b"\xff" * 4 * 8)
    probe = subprocess.run(["qemu-img", "info", "-f", "bochs", tmp_path / "disk.bochs"], capture_output=True, text=True)
    assert probe.returncode == 0, probe.stderr
    result = disk("convert", tmp_path / "disk.bochs", tmp_path / "target.raw")
    assert result.exit_code == 0, result.output
    content = (tmp_path / "target.raw").read_bytes()
    assert content == bytes(len(content))


@pytest.mark.parametrize("content", [b"", b"x" * 5000, b"\xff\xfe"])
def test_what_is_no_key_file(content: bytes, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(content)
    with pytest.raises(UnsupportedFormat, match="the key file key"):
        passphrase(QemuSpec(driver="luks", path="/nowhere", key_file=str(key)))
    key.unlink()
    with pytest.raises(UnsupportedFormat, match="No such file"):
        passphrase(QemuSpec(driver="luks", path="/nowhere", key_file=str(key)))
    assert passphrase(QemuSpec(driver="luks", path="/nowhere")) is None
