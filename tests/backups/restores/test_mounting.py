"""A restore point's disks by NBD: what is read is what was backed up, and no more is read for it than its chunks."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from urllib.parse import unquote
from uuid import UUID

import nbd
import pytest

from synvirt.backups.restores.mounting import mounted
from synvirt.disks.raw.files import RawReader
from synvirt.errors import BackupBadRequest
from synvirt.repository.disk import PointReader
from synvirt.repository.folder import Folder
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.repository import Repository
from tests.fakes.disks import MemoryReader
from tests.needs import need
from tests.repository.folders import MemoryFolder
from tests.repository.points import KEY, back_up, disk, opened

PAGE = 4096


class Watched(MemoryFolder):
    """Counts the bytes that are read of packs."""

    read_bytes = 0

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        content = super().read(name, offset, length)
        self.read_bytes += len(content) if name.startswith("packs/") else 0
        return content


def noise(chunks: int) -> MemoryReader:
    reader = disk("A" * 4 * chunks)
    reader.content = Random(4).randbytes(reader.size)
    return reader


def point_in(folder: Folder, *disks: MemoryReader) -> tuple[Repository, UUID]:
    repository = opened(folder, new=True)
    return repository, back_up(repository, *disks)


def test_a_cold_page_costs_a_chunk_at_most_and_a_warm_one_nothing() -> None:
    folder = Watched()
    content = noise(8)
    _, point_id = point_in(folder, content)
    repository = Repository(folder, KEY)
    with mounted(repository, repository.manifest(point_id)) as (one,):
        client = nbd.NBD()
        client.connect_uri(one.uris[0])
        for number in range(8):
            at = number * CHUNK_BYTES + number * PAGE
            before = folder.read_bytes
            assert client.pread(PAGE, at) == content.content[at : at + PAGE]
            cold = folder.read_bytes - before
            assert 0 < cold < CHUNK_BYTES + PAGE, "the chunk, and what its frame adds"
            assert client.pread(PAGE, at + PAGE) == content.content[at + PAGE : at + 2 * PAGE]
            assert folder.read_bytes - before == cold
        client.shutdown()


def test_extents_of_a_range_are_those_of_the_disk() -> None:
    reader = disk("A--------B------AAAA----C")
    repository, point_id = point_in(MemoryFolder(), reader)
    (shown,) = repository.manifest(point_id).shown.disks
    point = PointReader(repository, shown)
    whole = [extent.zero for extent in point.extents() for _ in range(extent.length // PAGE)]
    for start, end in (
        (0, reader.size),
        (PAGE, 5 * CHUNK_BYTES),
        (CHUNK_BYTES - PAGE, CHUNK_BYTES + PAGE),
        (7 * PAGE, 8 * PAGE),
    ):
        found = list(point.extents_between(start, end))
        assert (found[0].start, found[-1].end) == (start, end)
        assert [extent.zero for extent in found for _ in range(extent.length // PAGE)] == whole[start // PAGE : end // PAGE]


def test_each_disk_has_a_socket_and_nothing_is_left(tmp_path: Path) -> None:
    first, second = disk("AB--C"), disk("DDDD")
    repository, point_id = point_in(MemoryFolder(), first, second)
    with mounted(repository, repository.manifest(point_id)) as disks:
        for one, reader in zip(disks, (first, second), strict=True):
            path = tmp_path / one.target
            subprocess.run([need("nbdcopy", "libnbd-bin"), one.uris[0], path], check=True, timeout=60)
            assert [path.read_bytes() == reader.content] == [True]
            assert one.failure is None
        folder = Path(disks[0].uris[0].partition("socket=")[2]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    with pytest.raises(BackupBadRequest, match="vdx"), mounted(repository, repository.manifest(point_id), ("vdx",)):
        pass
    with pytest.raises(BackupBadRequest, match="port"), mounted(repository, repository.manifest(point_id), port=0):
        pass
    with mounted(repository, repository.manifest(point_id), ("disk1",), port=0) as (one,):
        assert one.uris[1].startswith("nbd://127.0.0.1:")


def test_disks_whose_targets_make_no_file_names_or_the_same_are_all_served() -> None:
    """Targets come from a domain's XML. The second socket of a name could not be made."""
    repository, point_id = point_in(MemoryFolder(), *(disk("A" * number) for number in range(1, 6)))
    manifest = repository.manifest(point_id)
    targets = ("vda", "../vd/a", "/", "\N{SNOWMAN}" * 200 + "sda", "\N{LATIN SMALL LETTER E WITH ACUTE}" * 200)
    named = tuple(one.model_copy(update={"target": target}) for one, target in zip(manifest.sealed.disks, targets, strict=True))
    hostile = manifest.model_copy(update={"sealed": manifest.sealed.model_copy(update={"disks": named})})
    with mounted(repository, hostile) as disks:
        sockets = [Path(unquote(one.uris[0].partition("socket=")[2])) for one in disks]
        assert len({path.parent for path in sockets}) == 1
        assert [path.name for path in sockets] == ["vda", "1.vda", "2.", "sda", "4."]
        for one in disks:
            client = nbd.NBD()
            client.connect_uri(one.uris[0])
            assert client.get_size() == one.size_bytes
            client.shutdown()


def test_a_point_without_disks_is_refused() -> None:
    repository, point_id = point_in(MemoryFolder())
    with pytest.raises(BackupBadRequest, match="no disks"), mounted(repository, repository.manifest(point_id)):
        pass


def test_damage_is_an_error_of_the_read_and_is_reported() -> None:
    folder = MemoryFolder()
    repository, point_id = point_in(folder, noise(1))
    (name,) = [name for name in folder.files if name.startswith("packs/")]
    content = bytearray(folder.files[name].content)
    content[100] ^= 1
    folder.files[name].content = bytes(content)
    with mounted(repository, repository.manifest(point_id)) as (one,):
        client = nbd.NBD()
        client.connect_uri(one.uris[0])
        with pytest.raises(nbd.Error):
            client.pread(PAGE, 0)
        assert one.failure is not None
        assert one.failure.code == "E_BAK_DAMAGED"
        client.shutdown()


def test_a_file_system_in_a_point_is_read_without_a_restore(tmp_path: Path) -> None:
    """mke2fs makes it, and debugfs reads its file from what nbdcopy is served."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "hello").write_bytes(b"from the file system\n")
    image = tmp_path / "image"
    subprocess.run([need("mke2fs", "e2fsprogs"), "-q", "-t", "ext4", "-d", inside, image, "4M"], check=True)
    reader = RawReader(str(image))
    repository = opened(MemoryFolder(), new=True)
    point_id = back_up(repository, reader)
    reader.close()
    with mounted(repository, repository.manifest(point_id)) as (one,):
        copied = tmp_path / "copied"
        subprocess.run([need("nbdcopy", "libnbd-bin"), one.uris[0], copied], check=True, timeout=60)
        shown = subprocess.run(["debugfs", "-R", "cat hello", copied], capture_output=True, check=True)
        assert shown.stdout == b"from the file system\n"


def test_the_command_serves_until_a_signal_ends_it(tmp_path: Path) -> None:
    from tests.backups.house import disk_content

    point = _point_in(tmp_path)
    command = [sys.executable, "-m", "synvirt", "backup", "mount", str(point)[:8], "--data-dir", str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "src"}) as child:
        try:
            assert child.stdout is not None
            (reported,) = json.loads(child.stdout.readline())["disks"]
            assert (reported["target"], reported["size_bytes"]) == ("vda", len(disk_content()))
            compare = [need("qemu-img", "qemu-utils"), "compare", "-f", "raw", "-F", "raw", reported["uris"][0]]
            subprocess.run([*compare, tmp_path / "images/web"], check=True, timeout=60)
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 0
        finally:
            child.kill()
    assert not Path(reported["uris"][0].partition("socket=")[2]).exists()


def test_the_command_says_what_is_served_and_how_to_read_it(tmp_path: Path) -> None:
    point = _point_in(tmp_path)
    command = [sys.executable, "-m", "synvirt", "backup", "mount", str(point), "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "src"}) as child:
        try:
            assert child.stdout is not None
            disk_line = child.stdout.readline()
            uri = disk_line.split()[-1]
            assert disk_line.startswith("vda  ")
            assert child.stdout.readline() == "These are NBD exports, read-only, until Ctrl-C; no folder is mounted\n"
            how = child.stdout.readline()
            assert shlex.split(how)[-3:] == ["nbdfuse", "FOLDER", uri]
            assert f"'{uri}'" in how, "a shell may take its ? for a pattern"
        finally:
            child.send_signal(signal.SIGINT)
            try:
                assert child.wait(60) == 0
            finally:
                child.kill()


def _point_in(data_dir: Path) -> UUID:
    """A restore point in the data folder of a service that has ended."""
    from tests.backups.house import House, disk_content

    house = House(data_dir)
    house.image("web", disk_content())
    (point,) = house.run(house.job("web")).restore_point_ids
    house.close()
    (data_dir / "test.db").rename(data_dir / "migrator.db")
    return point
