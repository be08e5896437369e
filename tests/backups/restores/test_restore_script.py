"""The format as its page describes it: a script that shares no code with us restores what we back up."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

from synvirt.repository.folder import HostFolder
from synvirt.repository.keys import CHUNK_BYTES, new_key, recovery_text
from synvirt.repository.repository import Repository, create
from tests.fakes.disks import MemoryReader
from tests.repository.points import back_up

SCRIPT = Path(__file__).parents[3] / "scripts/restore_backup.py"


def _run(*arguments: str, key: str) -> subprocess.CompletedProcess[str]:
    # -I: it finds what is installed, and nothing of this project's folder.
    return subprocess.run(
        [sys.executable, "-I", str(SCRIPT), *arguments],
        env=os.environ | {"SYNVIRT_RECOVERY_KEY": key},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_script_restores_a_point(tmp_path: Path) -> None:
    master, folder = new_key(), tmp_path / "repository"
    folder.mkdir()
    create(HostFolder(folder), master)
    repository = Repository(HostFolder(folder), master)
    noise = MemoryReader("AB-C-", block_bytes=CHUNK_BYTES - 3)
    noise.content = Random(5).randbytes(2 * CHUNK_BYTES - 6) + noise.content[2 * CHUNK_BYTES - 6 :]
    point = back_up(repository, noise, MemoryReader("--X", block_bytes=5000))
    key = recovery_text(master)
    listed = _run(str(folder), key=key)
    assert listed.stdout.startswith(str(point)), listed.stderr
    assert _run(str(folder), str(point), str(tmp_path / "out"), key=key).returncode == 0
    assert [(tmp_path / "out/0-disk0.raw").read_bytes() == noise.content] == [True]
    assert (tmp_path / "out/1-disk1.raw").read_bytes() == MemoryReader("--X", block_bytes=5000).content
    assert (tmp_path / "out/domain.xml").read_text() == "<domain/>"
    assert _run(str(folder), key=recovery_text(new_key())).returncode == 1


def test_the_script_refuses_what_is_damaged(tmp_path: Path) -> None:
    master, folder = new_key(), tmp_path / "repository"
    folder.mkdir()
    create(HostFolder(folder), master)
    point = back_up(Repository(HostFolder(folder), master), MemoryReader("AB", block_bytes=CHUNK_BYTES))
    (pack,) = (folder / "packs").iterdir()
    content = bytearray(pack.read_bytes())
    content[30] ^= 1
    pack.write_bytes(content)
    answer = _run(str(folder), str(point), str(tmp_path / "out"), key=recovery_text(master))
    assert answer.returncode == 1
    assert "damaged" in answer.stderr


def test_the_script_stays_small() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 220
