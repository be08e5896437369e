"""The laws of OfflineImporter, as one suite. An importer joins by a subclass whose fixture `case` makes what it reads:

class TestOvaArchive(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path) -> ImporterCase:
        ...
        return ImporterCase(OvaArchive(), path, tmp_path, contents={"vmdisk1": raw})
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from synvirt.disks import detect as detect_image
from synvirt.disks import open_reader
from synvirt.disks.specs import ImageSpec, RawSpec, paths
from synvirt.errors import HostPathRejected, NotFound, SynvirtError
from synvirt.model.machine import VmManifest
from synvirt.offline import OfflineImporter, OpenedDisk
from synvirt.offline.known_by import HEAD_BYTES, may_be_appliance
from synvirt.offline.registry import IMPORTERS, detect, importer_for
from tests.contracts.readers import read_all
from tests.contracts.spec_json import CHECKSUM_SPEC, READER_SPEC
from tests.counted import bytes_read
from tests.running.processes import open_files

# The service promises a manifest within a second: headers and tables, never the disks. A little room for what grows.
INSPECT_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ImporterCase:
    """`path` under `root` is a whole VM of the importer's kind; `contents` are its disks by key, as raw bytes. `damage` is
    the file that the damage laws cut and flip bytes in."""

    importer: OfflineImporter
    path: Path
    root: Path
    contents: Mapping[str, bytes]
    damage: Path


class ImporterContract:
    @pytest.fixture
    def case(self) -> ImporterCase:
        raise NotImplementedError

    def test_is_registered_under_its_kind_and_detected(self, case: ImporterCase) -> None:
        assert type(importer_for(case.importer.kind)) is type(case.importer)
        assert detect(case.path, case.root).kind == case.importer.kind

    def test_probe_takes_its_own_and_no_other_does(self, case: ImporterCase) -> None:
        head = _head(case.path)
        assert next(other.kind for other in IMPORTERS if other.probe(case.path, head)) == case.importer.kind

    def test_the_quick_look_lets_it_through(self, case: ImporterCase) -> None:
        """The command line asks the importers only of what may be an appliance, and is no image that it knows by itself."""
        is_image = not case.path.is_dir() and not isinstance(detect_image(case.path), RawSpec)
        assert case.path.is_dir() or is_image or may_be_appliance(case.path.name, _head(case.path))

    def test_probe_never_raises(self, case: ImporterCase) -> None:
        numbers = Random(0)
        heads = [b"", b"\0" * HEAD_BYTES, numbers.randbytes(600), _head(case.path)[:700], b"\xff\xfe<"]
        gone, locked = case.root / "gone.ova", case.root / "locked.ova"
        locked.mkdir(mode=0o000)
        for path in (case.path, case.root, gone, locked, case.root / ("x" * 300), Path("/proc/self/mem")):
            for head in heads:
                assert case.importer.probe(path, head) in (True, False)
        locked.chmod(0o700)

    def test_the_manifest_is_whole_and_the_same_each_time(self, case: ImporterCase) -> None:
        manifest = case.importer.inspect(case.path, case.root)
        with bytes_read() as count:
            assert case.importer.inspect(case.path, case.root) == manifest
        assert count.bytes < INSPECT_MAX_BYTES
        assert VmManifest.model_validate_json(manifest.model_dump_json()) == manifest
        assert manifest.name
        assert manifest.vm_id
        assert not manifest.cbt_available
        assert manifest.cbt_reason
        assert {disk.key: disk.capacity_bytes for disk in manifest.disks} == {
            key: len(content) for key, content in case.contents.items()
        }
        for unique in ("key", "label"):
            assert len({getattr(disk, unique) for disk in manifest.disks}) == len(manifest.disks)
        assert len({(disk.controller, disk.unit) for disk in manifest.disks}) == len(manifest.disks)
        assert len({concern.id for concern in manifest.concerns}) == len(manifest.concerns)
        assert str(case.root) not in manifest.model_dump_json(), "a path of this host is told to the world"

    def test_every_disk_reads_as_what_was_put_in(self, case: ImporterCase) -> None:
        for key, content in case.contents.items():
            opened = case.importer.open_disk(case.path, case.root, key)
            reader = open_reader(opened.reader)
            try:
                assert read_all(reader) == content
            finally:
                reader.close()

    def test_a_disk_opens_the_same_way_again_and_survives_the_store(self, case: ImporterCase) -> None:
        for key in case.contents:
            opened = case.importer.open_disk(case.path, case.root, key)
            assert case.importer.open_disk(case.path, case.root, key) == opened
            assert READER_SPEC.validate_json(READER_SPEC.dump_json(opened.reader)) == opened.reader
            assert all(CHECKSUM_SPEC.validate_json(CHECKSUM_SPEC.dump_json(each)) == each for each in opened.checksums)

    def test_a_spec_stays_under_the_root(self, case: ImporterCase) -> None:
        for key in case.contents:
            for path in _paths(case.importer.open_disk(case.path, case.root, key)):
                assert Path(path).resolve().is_relative_to(case.root.resolve())

    def test_checksums_are_those_of_the_ranges_they_name(self, case: ImporterCase) -> None:
        for key in case.contents:
            for check in case.importer.open_disk(case.path, case.root, key).checksums:
                with Path(check.path).open("rb") as file:
                    file.seek(check.offset)
                    assert hashlib.new(check.algorithm, file.read(check.length)).hexdigest() == check.expected

    def test_an_unknown_disk_is_not_found(self, case: ImporterCase) -> None:
        with pytest.raises(NotFound, match="no such disk key"):
            case.importer.open_disk(case.path, case.root, "no such disk key")

    def test_what_is_gone_is_not_found(self, case: ImporterCase) -> None:
        with pytest.raises(NotFound):
            case.importer.inspect(case.path.with_name("gone"), case.root)

    def test_what_lies_outside_the_root_is_rejected(self, case: ImporterCase) -> None:
        inner = case.root / "inner"
        inner.mkdir()
        with pytest.raises(HostPathRejected):
            case.importer.inspect(case.path, inner)
        link = inner / case.path.name
        link.symlink_to(case.path)
        with pytest.raises(HostPathRejected):
            detect(link, inner)

    def test_nothing_is_written_and_nothing_left_open(self, case: ImporterCase) -> None:
        before = {path: path.stat().st_mtime_ns for path in case.root.rglob("*")}
        case.importer.probe(case.path, _head(case.path))
        case.importer.inspect(case.path, case.root)
        for key in case.contents:
            case.importer.open_disk(case.path, case.root, key)
        assert open_files(case.root) == []
        assert {path: path.stat().st_mtime_ns for path in case.root.rglob("*")} == before

    def test_cut_short_or_flipped_it_is_read_or_refused_by_name(self, case: ImporterCase) -> None:
        """Our own errors only, and no descriptor is lost on the way."""
        for _ in _damaged(case.damage, Random(7)):
            problem = _refusal(case)
            assert problem is None or problem.code != "E_MIG_INTERNAL"
            assert problem is None or str(case.root) not in problem.detail
        assert open_files(case.root) == []


def _refusal(case: ImporterCase) -> SynvirtError | None:
    try:
        case.importer.inspect(case.path, case.root)
        for key in case.contents:
            case.importer.open_disk(case.path, case.root, key)
    except SynvirtError as problem:
        return problem
    return None


def _head(path: Path) -> bytes:
    if path.is_dir():
        return b""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _damaged(path: Path, numbers: Random) -> Iterator[None]:
    """The file empty, then cut short, then with one flipped bit. It is changed in place: to write an image eighty times takes
    longer than what is tested."""
    whole = path.read_bytes()
    path.write_bytes(b"")
    yield
    path.write_bytes(whole)
    for length in sorted((numbers.randrange(len(whole)) for _ in range(20)), reverse=True):
        os.truncate(path, length)
        yield
    path.write_bytes(whole)
    for _ in range(60):
        at = numbers.randrange(min(len(whole), 20_000))
        _put(path, at, whole[at] ^ (1 << numbers.randrange(8)))
        yield
        _put(path, at, whole[at])


def _put(path: Path, at: int, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))


def _paths(opened: OpenedDisk) -> Iterator[str]:
    yield from (check.path for check in opened.checksums)
    yield from paths(opened.reader)
    if isinstance(opened.reader, ImageSpec) and isinstance(opened.reader.root, str):
        yield opened.reader.root
