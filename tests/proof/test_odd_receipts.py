"""Receipts as a forger or a full disk may leave them: named, and nothing breaks."""

import errno
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.errors import MalformedArchive
from synvirt.proof.bag import write_bag
from synvirt.proof.signing import HostKey
from synvirt.proof.unpacking import unpack
from synvirt.proof.verifying import checked
from tests.proof.test_receipts import listed_again

ROOT = f"receipt-{UUID(int=1)}"


@pytest.fixture
def key(tmp_path: Path) -> HostKey:
    return HostKey(tmp_path / "receipts.key", "kvm1")


@pytest.fixture
def tar(tmp_path: Path, key: HostKey) -> Path:
    """Of a receipt with one volume, of which it has no hashes."""
    volume = {"key": "disk-0", "size_bytes": 1, "ledger": None, "reason": "it was not read"}
    write_bag(tmp_path / "tar", root=ROOT, predicate={"volumes": [volume]}, plan=b"{}", ledgers=[], key=key)
    return tmp_path / "tar"


@pytest.mark.parametrize(
    "change",
    [
        lambda statement: statement["predicate"]["volumes"][0].update(ledger=[]),
        lambda statement: statement["predicate"]["volumes"][0].update(ledger=7),
        lambda statement: statement["subject"].append({"name": 5, "digest": {"sha256": "0" * 64}}),
        lambda statement: statement["subject"].append({"name": [], "digest": {"sha256": "0" * 64}}),
        lambda statement: statement["subject"].append({"name": "x"}),
    ],
)
def test_a_statement_of_odd_types_is_named_though_it_is_signed(
    tar: Path, key: HostKey, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    with tar.open("rb") as file:
        folder = unpack(file, tmp_path, ROOT)
    assert checked(folder, key.public).problems == ()
    statement = json.loads((folder / "data/statement.json").read_bytes())
    change(statement)
    content = json.dumps(statement).encode()
    (folder / "data/statement.json").write_bytes(content)
    (folder / "statement.json.sig").write_text(key.sshsig(content))
    (folder / "receipt.dsse.json").write_text(key.dsse(content))
    listed_again(folder)
    assert checked(folder, key.public).problems != ()


def test_what_is_unpacked_to_a_full_disk_leaves_nothing(tar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    to = tmp_path / "to"
    with tar.open("rb") as file:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "copyfileobj", full)
            with pytest.raises(OSError, match="No space"):
                unpack(file, to, ROOT)
        assert list(to.iterdir()) == []
        file.seek(0)
        assert checked(unpack(file, to, ROOT)).problems == ()


@pytest.mark.parametrize(("key", "value"), [("GNU.sparse.map", "a,b"), ("GNU.sparse.size", "1e999"), ("size", "9" * 400)])
def test_a_tar_with_a_number_that_is_none_is_refused(tmp_path: Path, key: str, value: str) -> None:
    """Python's own reader raises a ValueError, or an OverflowError, of what the headers say."""
    odd = io.BytesIO()
    with tarfile.open(fileobj=odd, mode="w", format=tarfile.PAX_FORMAT) as writing:
        member = tarfile.TarInfo(f"{ROOT}/bagit.txt")
        member.pax_headers = {key: value}
        writing.addfile(member)
    odd.seek(0)
    with pytest.raises(MalformedArchive):
        unpack(odd, tmp_path / "to", ROOT)
    assert list((tmp_path / "to").iterdir()) == []
