"""Digests checked beside the copy: right ones pass, wrong ones end the copy at once and say so."""

import hashlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from synvirt.blocks import Extent
from synvirt.copying import copy
from synvirt.disks.checking import checksum
from synvirt.disks.checking.checksum import Checksums, check
from synvirt.disks.specs import ChecksumAlgorithm, ChecksumSpec
from synvirt.errors import Cancelled, DiskReadFailed, Internal, MalformedArchive
from tests.fakes.disks import BLOCK_BYTES, ForgetfulWriter, LettersReader, MemoryReader, MemoryWriter, ThrottledReader

ALGORITHMS: tuple[ChecksumAlgorithm, ...] = get_args(ChecksumAlgorithm)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "a.ova"
    path.write_bytes(os.urandom(3 * checksum.STEP_BYTES + 12345))
    return path


def spec_of(
    archive: Path, *, algorithm: ChecksumAlgorithm = "sha256", offset: int = 1536, length: int = 2_500_000, wrong: bool = False
) -> ChecksumSpec:
    digest = hashlib.new(algorithm, archive.read_bytes()[offset : offset + length]).hexdigest()
    expected = digest[::-1] if wrong else digest
    return ChecksumSpec(
        path=str(archive), offset=offset, length=length, algorithm=algorithm, expected=expected, name="disk1.vmdk"
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_right_digest_passes_in_any_case_of_letters(archive: Path, algorithm: ChecksumAlgorithm) -> None:
    spec = spec_of(archive, algorithm=algorithm)
    check(spec)
    check(replace(spec, expected=f" {spec.expected.upper()}\n"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_wrong_digest_names_the_member_and_both_digests(archive: Path, algorithm: ChecksumAlgorithm) -> None:
    wrong = spec_of(archive, algorithm=algorithm, wrong=True)
    with pytest.raises(MalformedArchive, match=r"disk1\.vmdk.*is [0-9a-f]{40}.*says [0-9a-f]{40}") as caught:
        check(wrong)
    assert caught.value.hint
    assert str(archive.parent) not in caught.value.detail


@pytest.mark.parametrize("length", [0, 1, checksum.STEP_BYTES, checksum.STEP_BYTES + 1])
def test_any_length_is_hashed_whole(archive: Path, length: int) -> None:
    check(spec_of(archive, length=length))


def test_an_archive_that_ends_early_is_a_read_error(archive: Path) -> None:
    spec = spec_of(archive)
    os.truncate(archive, 100_000)
    with Checksums((spec,)) as checksums, pytest.raises(DiskReadFailed, match="it ends at 100000"):
        checksums.verify()


def test_all_are_checked(archive: Path) -> None:
    with Checksums((spec_of(archive), spec_of(archive, offset=0, wrong=True))) as checksums, pytest.raises(MalformedArchive):
        checksums.verify()
    with Checksums((spec_of(archive), spec_of(archive, offset=0))) as checksums:
        checksums.verify()
    with Checksums(()) as checksums:
        checksums.verify()


def test_a_wrong_digest_ends_the_copy_with_its_own_error(archive: Path) -> None:
    """The copy is ended by `stop`, and so raises Cancelled: but nobody cancelled."""
    size = 384 * BLOCK_BYTES
    # Six requests, of which the first ones are enough.
    reader = ThrottledReader(LettersReader(size, [Extent(0, size)]), 0.5)
    began = time.monotonic()
    with pytest.raises(MalformedArchive), Checksums((spec_of(archive, wrong=True),)) as checksums:
        copy(reader, ForgetfulWriter(size), stop=checksums.stop)
    assert time.monotonic() - began < 60


def test_a_cancel_stays_a_cancel(archive: Path) -> None:
    with pytest.raises(Cancelled), Checksums((spec_of(archive),), stop=lambda: True) as checksums:
        copy(MemoryReader("AB"), MemoryWriter(2 * BLOCK_BYTES), stop=checksums.stop)


def test_leaving_early_leaves_no_thread(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "STEP_BYTES", 16)  # so that hashing all would take long
    before = set(threading.enumerate())
    with pytest.raises(KeyError), Checksums((spec_of(archive),)):
        raise KeyError
    assert set(threading.enumerate()) == before


def test_a_foreign_error_is_internal_and_no_success(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **more: object) -> None:
        raise ValueError("unsupported hash type")

    monkeypatch.setattr(hashlib, "new", broken)
    spec = ChecksumSpec(path=str(archive), length=10, algorithm="sha1", expected="", name="x")
    with Checksums((spec,)) as checksums, pytest.raises(Internal, match="ValueError"):
        checksums.verify()
