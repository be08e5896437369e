"""The tar walker against GNU tar and Python's tarfile, and against archives that are damaged or made to harm."""

import io
import os
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt import programs
from synvirt.disks import tar
from synvirt.disks.raw.files import RawReader
from synvirt.errors import MalformedArchive
from tests.counted import bytes_read
from tests.needs import need
from tests.offline import appliances

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
GIB = 1 << 30


def _index(path: Path) -> dict[str, tar.Member]:
    with closing(RawReader(str(path))) as archive:
        return tar.index(archive)


def _header(name: str, size: int = 0, typeflag: bytes = b"0", **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, typeflag
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def _with_checksum(block: bytes, *, signed: bool = False) -> bytes:
    blank = block[:148] + b" " * 8 + block[156:]
    total = sum(byte - 256 if signed and byte > 127 else byte for byte in blank)
    return block[:148] + b"%06o\0 " % total + block[156:]


_PART = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"), exclude_characters="/"), min_size=1, max_size=120)
_NAME = st.lists(_PART.filter(lambda part: part not in (".", "..")), min_size=1, max_size=3).map("/".join)


@settings(max_examples=150, deadline=None)
@given(
    files=st.dictionaries(_NAME, st.binary(max_size=2000), max_size=6),
    tar_format=st.sampled_from(["gnu", "pax"]),
)
def test_every_member_that_tarfile_writes_is_found_where_it_lies(
    files: dict[str, bytes], tar_format: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = appliances.archive(tmp_path_factory.mktemp("tar") / "a.tar", files, FORMATS[tar_format])
    data = path.read_bytes()
    found = {name: data[member.offset : member.offset + member.size] for name, member in _index(path).items()}
    assert found == files


@pytest.mark.parametrize("dialect", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_gnu_tar_writes_folders_links_and_long_names_in_every_dialect(dialect: str, tmp_path: Path) -> None:
    need("tar", "tar")
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    long_name = "d" * 60 if dialect == "v7" else "n" * 90
    deep = f"sub/{long_name}"
    (folder / deep).write_bytes(b"x" * 5000)
    (folder / "a.ovf").write_bytes(b"<Envelope/>")
    (folder / "link").symlink_to("a.ovf")
    os.link(folder / "a.ovf", folder / "hard")
    path = tmp_path / "a.tar"
    programs.run(
        ["tar", f"--format={dialect}", "-cf", str(path), "-C", str(folder), "a.ovf", "hard", "link", "sub"], timeout_s=30
    )
    members = _index(path)
    data = path.read_bytes()
    assert data[members[deep].offset :][:5000] == b"x" * 5000
    assert members["sub"].sort is tar.Sort.FOLDER
    assert members["link"].sort is members["hard"].sort is tar.Sort.OTHER
    assert members["a.ovf"].size == len("<Envelope/>")


def test_pax_sizes_beyond_eight_gibibytes(tmp_path: Path) -> None:
    _huge_archive(tmp_path / "a.tar", [9 * GIB, 512], tarfile.PAX_FORMAT)
    assert [member.size for member in _index(tmp_path / "a.tar").values()] == [9 * GIB, 512]


def test_gnu_base_256_sizes_beyond_eight_gibibytes(tmp_path: Path) -> None:
    _huge_archive(tmp_path / "a.tar", [9 * GIB, 512], tarfile.GNU_FORMAT)
    assert [member.size for member in _index(tmp_path / "a.tar").values()] == [9 * GIB, 512]


def test_twelve_octal_digits_without_a_terminator(tmp_path: Path) -> None:
    size = 12 * GIB
    header = _with_checksum(_header("disk.vmdk")[:124] + b"%012o" % size + _header("disk.vmdk")[136:])
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(header)
        file.truncate(512 + size)
    assert _index(tmp_path / "a.tar")["disk.vmdk"].size == size


def test_an_archive_of_100_gib_is_walked_by_its_headers(tmp_path: Path) -> None:
    _huge_archive(tmp_path / "a.tar", [GIB - 7] * 100, tarfile.USTAR_FORMAT)
    assert (tmp_path / "a.tar").stat().st_size > 99 * GIB
    with bytes_read() as count:
        members = _index(tmp_path / "a.tar")
    assert len(members) == 100
    assert count.bytes < 4 << 20


def _huge_archive(path: Path, sizes: list[int], tar_format: Literal[0, 1, 2]) -> None:
    with path.open("wb") as file:
        for number, size in enumerate(sizes):
            info = tarfile.TarInfo(f"disk{number}")
            info.size = size
            file.write(info.tobuf(tar_format))
            file.seek(-(-size // 512) * 512, io.SEEK_CUR)
        file.truncate(file.tell() + 1024)


def test_signed_checksums_of_early_suns(tmp_path: Path) -> None:
    plain = bytearray(_header("disk"))
    plain[0:4] = "dïsk".encode("latin-1")
    (tmp_path / "a.tar").write_bytes(_with_checksum(bytes(plain), signed=True) + bytes(1024))
    assert list(_index(tmp_path / "a.tar")) == ["dïsk"]


def test_leading_dot_slash_is_no_part_of_a_name(tmp_path: Path) -> None:
    path = appliances.archive(tmp_path / "a.tar", {"./a.ovf": b"x", "./disks//b.vmdk": b"y"})
    assert list(_index(path)) == ["a.ovf", "disks/b.vmdk"]


def test_no_end_of_archive_blocks(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(_header("a", 3) + b"abc")
    assert _index(tmp_path / "a.tar")["a"].size == 3


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "a/..", "a\nb"])
def test_names_that_lead_out_or_hide(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(_header(name) + bytes(1024))
    with pytest.raises(MalformedArchive, match="at offset 0"):
        _index(tmp_path / "a.tar")


def test_a_name_of_over_4096_bytes(tmp_path: Path) -> None:
    appliances.archive(tmp_path / "a.tar", {"x" * 5000: b""}, tarfile.PAX_FORMAT)
    with pytest.raises(MalformedArchive, match="name of over 4096 bytes"):
        _index(tmp_path / "a.tar")


def test_two_members_of_one_name(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a.ovf"))
    with pytest.raises(MalformedArchive, match=r"two members are named 'a.ovf': data at offset 512 and 1024"):
        _index(tmp_path / "a.tar")


def test_more_members_than_an_appliance_has(tmp_path: Path) -> None:
    appliances.archive(tmp_path / "a.tar", {str(number): b"" for number in range(20)})
    with closing(RawReader(str(tmp_path / "a.tar"))) as archive, pytest.raises(MalformedArchive, match="more than 19 members"):
        tar.index(archive, members_max=19)


@pytest.mark.parametrize("left", [0, 100, 511, 512, 600, 1535])
def test_cut_short_anywhere(left: int, tmp_path: Path) -> None:
    path = appliances.archive(tmp_path / "a.tar", {"a": b"x" * 1024})
    path.write_bytes(path.read_bytes()[:left])
    if left == 0:
        assert _index(path) == {}
        return
    with pytest.raises(MalformedArchive, match="cut short"):
        _index(path)


def test_a_flipped_bit_in_a_header(tmp_path: Path) -> None:
    path = appliances.archive(tmp_path / "a.tar", {"a": b"x" * 1024, "b": b""})
    data = bytearray(path.read_bytes())
    data[1536 + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(MalformedArchive, match="no tar header at offset 1536: its checksum is wrong"):
        _index(path)


def test_a_member_that_claims_more_than_the_archive_has(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(_header("disk.vmdk", 10**9) + bytes(4096))
    with pytest.raises(MalformedArchive, match=r"'disk.vmdk' has 1000000000 bytes at offset 512, the archive only 4608"):
        _index(tmp_path / "a.tar")


def test_a_negative_size(tmp_path: Path) -> None:
    block = _header("a")
    (tmp_path / "a.tar").write_bytes(_with_checksum(block[:124] + b"\xff" * 12 + block[136:]) + bytes(1024))
    with pytest.raises(MalformedArchive, match="where a number belongs"):
        _index(tmp_path / "a.tar")


@pytest.mark.parametrize("dialect", ["gnu", "posix"])
def test_sparse_members(dialect: str, tmp_path: Path) -> None:
    need("tar", "tar")
    with (tmp_path / "disk.raw").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"data")
        file.truncate(4 << 20)
    path = tmp_path / "a.tar"
    programs.run(["tar", f"--format={dialect}", "-S", "-cf", str(path), "-C", str(tmp_path), "disk.raw"], timeout_s=30)
    with pytest.raises(MalformedArchive, match="sparse") as caught:
        _index(path)
    assert "without --sparse" in (caught.value.hint or "")


def test_a_continued_volume(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(_header("a", typeflag=b"M") + bytes(1024))
    with pytest.raises(MalformedArchive, match="another volume"):
        _index(tmp_path / "a.tar")


def test_an_extended_header_that_would_fill_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(_header("pax", 8 * GIB, b"x"))
        file.truncate(9 * GIB)
    with pytest.raises(MalformedArchive, match="no real one"):
        _index(tmp_path / "a.tar")


def test_extended_headers_without_end(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(_header("pax", 0, b"x") * 1000)
    with pytest.raises(MalformedArchive, match="no real one"):
        _index(tmp_path / "a.tar")


@pytest.mark.parametrize(
    "record", [b"5 a=b\n", b"99 path=x\n", b"x path=a\n", b"8 pathx\n", b"0 a=b\n", b"11 size=-1\n", b"13 size=1e100\n"]
)
def test_damaged_pax_records(record: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(_header("pax", len(record), b"x") + record.ljust(512, b"\0") + _header("a") + bytes(1024))
    with pytest.raises(MalformedArchive):
        _index(tmp_path / "a.tar")


def test_an_extended_header_without_its_member_is_half_an_archive(tmp_path: Path) -> None:
    record = b"10 path=x\n"
    (tmp_path / "a.tar").write_bytes(_header("pax", len(record), b"x") + record.ljust(512, b"\0") + bytes(1024))
    with pytest.raises(MalformedArchive, match="the member it describes is missing"):
        _index(tmp_path / "a.tar")


def test_global_pax_headers_hold_for_all_that_follow(tmp_path: Path) -> None:
    record = b"22 GNU.sparse.major=1\n"
    (tmp_path / "a.tar").write_bytes(_header("pax", len(record), b"g") + record.ljust(512, b"\0") + _header("a") + bytes(1024))
    with pytest.raises(MalformedArchive, match="sparse"):
        _index(tmp_path / "a.tar")


def test_git_archive_begins_with_a_global_header_that_says_nothing_of_data(tmp_path: Path) -> None:
    record = b"52 comment=0123456789012345678901234567890123456789\n"
    (tmp_path / "a.tar").write_bytes(_header("pax", len(record), b"g") + record.ljust(512, b"\0") + _header("a") + bytes(1024))
    assert list(_index(tmp_path / "a.tar")) == ["a"]


def test_what_is_a_tar_by_its_first_block(tmp_path: Path) -> None:
    path = appliances.archive(tmp_path / "a.tar", {"a": b"x"})
    assert tar.is_tar(path.read_bytes())
    assert not tar.is_tar(bytes(1024))
    assert not tar.is_tar(b"KDMV" + bytes(1024))
    assert not tar.is_tar(path.read_bytes()[:511])


def test_global_headers_that_only_cost_time_are_refused(tmp_path: Path) -> None:
    """8.9 MB of them took 324 s: each was merged with all before it, for each member."""
    record = b"12 k%05d=v\n"
    headers = bytearray()
    for number in range(4000):
        body = b"".join(record % (number * 40 + key) for key in range(40))
        headers += _header("pax", len(body), b"g") + body.ljust(-(-len(body) // 512) * 512, b"\0") + _header(f"m{number}")
    (tmp_path / "a.tar").write_bytes(bytes(headers) + bytes(1024))
    with pytest.raises(MalformedArchive, match="over 100 global headers"):
        _index(tmp_path / "a.tar")


def test_records_that_say_nothing_of_data_are_not_kept(tmp_path: Path) -> None:
    body = b"".join(b"12 k%05d=v\n" % key for key in range(300))
    (tmp_path / "a.tar").write_bytes(
        _header("pax", len(body), b"x") + body.ljust(3600 // 512 * 512 + 512, b"\0") + _header("a")
    )
    with pytest.raises(MalformedArchive, match="over 200 records"):
        _index(tmp_path / "a.tar")
