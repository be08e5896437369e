"""A receipt: made once, checked by us and by the tools that everybody has, and every damage to it named."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from synvirt.disks import open_reader
from synvirt.disks.checking.block_hashes import BlockHashes
from synvirt.disks.checking.ledger import BLOCK_BYTES
from synvirt.disks.specs import RawSpec
from synvirt.errors import MalformedArchive, NotFound
from synvirt.proof import keeping
from synvirt.proof.bag import Ledger, write_bag
from synvirt.proof.keeping import CopiedDisk, MovedJob, Receipts
from synvirt.proof.signing import HostKey, PublicKey
from synvirt.proof.unpacking import unpack
from synvirt.proof.verifying import chained, checked, differing, volumes

PLAN = b'{"mode": "Cold"}\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Receipts, Path, Path]:
    """A host's receipts, three of them unpacked in a folder; and the volume that each is of."""
    base = tmp_path_factory.mktemp("receipts")
    receipts = Receipts(base / "kept", HostKey(base / "receipts.key", "kvm1"))
    volume = base / "volume"
    volume.write_bytes(random.Random(1).randbytes(BLOCK_BYTES) + bytes(BLOCK_BYTES) + random.Random(2).randbytes(5000))
    for number in range(3):
        job = job_of(receipts, volume, UUID(int=number + 1))
        receipts.make(job)
        with receipts.path_of(job.id).open("rb") as tar:
            unpack(tar, base / "all", f"receipt-{job.id}")
    return receipts, base / "all", volume


def job_of(receipts: Receipts, volume: Path, job_id: UUID) -> MovedJob:
    token, size = uuid4(), volume.stat().st_size
    path = receipts.hashes_file(job_id, 0)
    hashes = BlockHashes(path, size, token)
    hashes.fill(open_reader(RawSpec(path=str(volume))))
    hashes.close()
    disks = (
        CopiedDisk("scsi0:0", "web", "web-0", size, path),
        CopiedDisk("scsi0:1", "data", "web-1", 7 * BLOCK_BYTES, path.with_name("nothing")),
    )
    return MovedJob(job_id, {"job": {"id": str(job_id), "name": "web"}}, PLAN, disks, token)


def folders(all_: Path) -> list[Path]:
    return sorted(all_.iterdir())


def test_a_receipt_is_good_and_says_which_volume_has_no_hashes(made: tuple[Receipts, Path, Path]) -> None:
    receipts, all_, volume = made
    found = checked(folders(all_)[1], receipts.key.public)
    assert found.problems == ()
    assert found.statement is not None
    hashed, other = volumes(found.statement)
    assert other["ledger"] is None
    assert "read by the copy" in other["reason"]
    rows = (folders(all_)[1] / hashed["ledger"]).read_text().splitlines()
    content = volume.read_bytes()
    wanted = [hashlib.sha256(content[at : at + BLOCK_BYTES]).hexdigest() for at in range(0, len(content), BLOCK_BYTES)]
    assert rows == [f"{digest}  {number}" for number, digest in enumerate(wanted)]
    assert list(differing(folders(all_)[1], hashed, open_reader(RawSpec(path=str(volume))))) == []
    assert chained(all_, receipts.key.public) == []


def test_the_hashes_of_jobs_that_are_no_longer_here_are_forgotten(tmp_path: Path) -> None:
    receipts = Receipts(tmp_path / "kept", HostKey(tmp_path / "key", "kvm1"))
    receipts.forget_hashes_but(lambda _: False)
    kept, other = receipts.hashes_file(UUID(int=1), 0), receipts.hashes_file(UUID(int=2), 0)
    for file in (kept, other):
        file.write_bytes(b"x")
    foreign = tmp_path / "kept" / "hashes" / "lost+found"
    foreign.mkdir()
    receipts.forget_hashes_but(lambda job_id: job_id == UUID(int=1))
    assert (kept.exists(), other.parent.exists(), foreign.exists()) == (True, False, True)


def test_what_a_killed_service_left_of_a_receipt_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job may be cancelled then, or go on elsewhere: nobody makes that receipt again."""
    kept, key = tmp_path / "kept", HostKey(tmp_path / "key", "kvm1")
    volume = tmp_path / "volume"
    volume.write_bytes(b"x" * 5000)
    before = Receipts(kept, key)
    before.make(job_of(before, volume, UUID(int=1)))
    if (killed := os.fork()) == 0:
        monkeypatch.setattr(keeping, "write_bag", lambda *_, **__: os._exit(9))
        try:
            before.make(job_of(before, volume, UUID(int=2)))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == 9
    assert (kept / f".{UUID(int=2)}").is_dir()
    (kept / ".snapshot").mkdir()  # of its file system
    after = Receipts(kept, key)
    assert {path.name for path in kept.iterdir()} == {f"00000001-{UUID(int=1)}.tar", "hashes", ".snapshot"}
    assert after.published() == before.published()


def test_a_tar_that_unpacks_to_more_than_it_is_is_refused(tmp_path: Path) -> None:
    """A sparse file: its header may say any size."""
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(64 << 20)
    tar = tmp_path / "tar"
    subprocess.run(["tar", "-C", tmp_path, "--sparse", "--transform=s,^,receipt-x/,", "-cf", tar, "big"], check=True)
    assert tar.stat().st_size < 1 << 20
    with tar.open("rb") as file, pytest.raises(MalformedArchive, match="which no receipt has"):
        unpack(file, tmp_path, "receipt-x")
    assert not (tmp_path / "receipt-x").exists()


def test_a_job_has_one_receipt_however_often_it_is_made(made: tuple[Receipts, Path, Path]) -> None:
    receipts, _, volume = made
    before = receipts.published().head
    assert receipts.make(job_of(receipts, volume, UUID(int=3))) == before
    assert before is not None
    assert before.sequence == 3
    with pytest.raises(NotFound):
        receipts.path_of(uuid4())


@pytest.mark.parametrize("left", [0, 700, 5000])
def test_a_damaged_receipt_is_named_where_the_next_one_follows_it(tmp_path: Path, left: int) -> None:
    """The job after it has its guest here already: its receipt is missing, and nothing else."""
    receipts = Receipts(tmp_path / "kept", HostKey(tmp_path / "key", "kvm1"))
    volume = tmp_path / "volume"
    volume.write_bytes(b"x" * 5000)
    job = job_of(receipts, volume, UUID(int=1))
    receipts.make(job)
    os.truncate(receipts.path_of(job.id), left)
    with pytest.raises(MalformedArchive, match=r"00000001-.*\.tar of this host cannot be read"):
        receipts.make(job_of(receipts, volume, UUID(int=2)))


def test_others_check_it_with_what_every_host_has(made: tuple[Receipts, Path, Path], tmp_path: Path) -> None:
    """The lines of docs/receipts.md."""
    receipts, all_, _ = made
    folder = folders(all_)[0]
    (tmp_path / "allowed_signers").write_text(receipts.published().allowed_signers)

    def verified(statement: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [
                *("ssh-keygen", "-Y", "verify", "-f", tmp_path / "allowed_signers", "-I", "synvirt@kvm1"),
                *("-n", "synvirt-receipt", "-s", folder / "statement.json.sig"),
            ],
            input=statement,
            capture_output=True,
            check=False,
            timeout=60,
        )

    statement = (folder / "data/statement.json").read_bytes()
    assert verified(statement).returncode == 0, verified(statement).stderr
    assert verified(statement.replace(b"web", b"wed", 1)).returncode != 0
    for manifest in ("manifest-sha256.txt", "tagmanifest-sha256.txt"):
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", manifest], cwd=folder, check=True, timeout=60)


DOCS = Path(__file__).parent.parent.parent / "docs"


def test_the_lines_of_the_document_check_a_receipt_and_name_a_block(made: tuple[Receipts, Path, Path], tmp_path: Path) -> None:
    """As docs/receipts.md has them, run by a shell: capitals there, and the folder's name, are what they stand for."""
    receipts, all_, volume = made
    folder, other = folders(all_)[0], tmp_path / "volume"
    shutil.copytree(folder, tmp_path / folder.name)
    shutil.copyfile(volume, other)
    (tmp_path / "allowed_signers").write_text(receipts.published().allowed_signers)
    text = (DOCS / "receipts.md").read_text()
    section = text[text.index("## Checking it without SynVirt") : text.index("## What is in it")]
    lines = "\n".join(re.findall(r"^    (.*)$", section, re.MULTILINE))
    for there, here in (("receipt-1f3a…", folder.name), ("HOST", "kvm1"), ("VOLUME", str(other))):
        assert there in lines
        lines = lines.replace(there, here)

    def run() -> subprocess.CompletedProcess[str]:
        words = ["/bin/sh", "-eu", "-c", lines]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    good = run()
    assert good.returncode == 0, good.stderr
    assert 'Good "synvirt-receipt" signature for synvirt@kvm1' in good.stdout
    assert "differs" not in good.stdout
    flip(other, BLOCK_BYTES + 5, 1)
    assert "block 1 differs" in run().stdout
    flip(tmp_path / folder.name / "data/plan.json", 0, 1)
    bad = run()
    assert bad.returncode != 0
    assert "data/plan.json: FAILED" in bad.stdout


def test_dsse_is_by_the_same_key(made: tuple[Receipts, Path, Path], tmp_path: Path) -> None:
    """By openssl, over the pre-authentication encoding of the DSSE protocol."""
    from base64 import b64decode

    receipts, all_, _ = made
    envelope = json.loads((folders(all_)[0] / "receipt.dsse.json").read_text())
    payload, kind = b64decode(envelope["payload"]), envelope["payloadType"].encode()
    (tmp_path / "signed").write_bytes(b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload))
    (tmp_path / "sig").write_bytes(b64decode(envelope["signatures"][0]["sig"]))
    # SubjectPublicKeyInfo of Ed25519 (RFC 8410) is 12 bytes and the key.
    (tmp_path / "key").write_bytes(bytes.fromhex("302a300506032b6570032100") + receipts.key.public.blob[-32:])
    argv = ["openssl", "pkeyutl", "-verify", "-pubin", "-keyform", "DER", "-inkey", "key", "-rawin"]
    subprocess.run([*argv, "-in", "signed", "-sigfile", "sig"], cwd=tmp_path, check=True, timeout=60, capture_output=True)


CHAIN = 8


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))


@pytest.fixture(scope="module")
def chain(made: tuple[Receipts, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PublicKey]:
    """A longer chain, unpacked: the folders in its order."""
    _, _, volume = made
    base = tmp_path_factory.mktemp("chain")
    receipts = Receipts(base / "kept", HostKey(base / "receipts.key", "kvm1"))
    for number in range(CHAIN):
        job = job_of(receipts, volume, UUID(int=number + 1))
        receipts.make(job)
        with receipts.path_of(job.id).open("rb") as tar:
            unpack(tar, base / "all", f"receipt-{job.id}")
    return base / "all", receipts.key.public


@pytest.mark.parametrize("part", range(4))
def test_each_of_a_thousand_damages_is_named(
    made: tuple[Receipts, Path, Path], chain: tuple[Path, PublicKey], tmp_path: Path, part: int
) -> None:
    """A bit flipped in a volume: its block. One in any file of a receipt, its ledger and its statement among them: the file. A
    receipt that is missing in the chain: its number. 250 of the seeds here, 1,000 in all; after each it is as it was."""
    receipts, all_, volume = made
    good, key = folders(all_)[0], receipts.key.public
    copy, image = tmp_path / "copy", tmp_path / "volume"
    shutil.copytree(good, copy)
    shutil.copyfile(volume, image)
    shutil.copytree(chain[0], tmp_path / "all")
    names = [str(path.relative_to(good)) for path in sorted(good.rglob("*")) if path.is_file()]
    assert len(names) == 9
    assert {"data/disk0.sha256", "data/statement.json"} <= set(names)
    statement = checked(good, key).statement
    assert statement is not None
    disk = volumes(statement)[0]
    for seed in range(part * 250, (part + 1) * 250):
        chance = random.Random(seed)
        kind = chance.choices(("volume", "receipt", "chain"), weights=(1, 3, 1))[0]
        if kind == "volume":
            at, bit = chance.randrange(volume.stat().st_size), 1 << chance.randrange(8)
            flip(image, at, bit)
            reported: list[str] = [str(block) for block in differing(good, disk, open_reader(RawSpec(path=str(image))))]
            assert reported == [str(at // BLOCK_BYTES)], f"seed {seed}"
            flip(image, at, bit)
        elif kind == "receipt":
            name = chance.choice(names)
            at, bit = chance.randrange((copy / name).stat().st_size), 1 << chance.randrange(8)
            flip(copy / name, at, bit)
            problems = checked(copy, key).problems
            assert any(name in problem for problem in problems), f"seed {seed}: {name} is not among {problems}"
            flip(copy / name, at, bit)
        else:
            # The last one is missed by whoever knows the host's head: that is not in the folder.
            number = chance.randrange(CHAIN - 1)
            gone = folders(tmp_path / "all")[number]
            gone.rename(tmp_path / "gone")
            found = chained(tmp_path / "all", chain[1])
            assert any(f"receipt {number + 1} is missing" in problem for problem in found), f"seed {seed}: {found}"
            (tmp_path / "gone").rename(gone)
    assert checked(copy, key).problems == ()
    assert list(differing(good, disk, open_reader(RawSpec(path=str(image))))) == []
    assert chained(tmp_path / "all", chain[1]) == []


def test_every_damage_of_the_one_file_that_nothing_lists_is_named(made: tuple[Receipts, Path, Path], tmp_path: Path) -> None:
    """The tag manifest has the hashes of all others, and no file has its own. So its own form must show each bit that flipped,
    each byte that is gone, and each row that is there twice."""
    receipts, all_, _ = made
    shutil.copytree(folders(all_)[0], tmp_path / "copy")
    path, key = tmp_path / "copy/tagmanifest-sha256.txt", receipts.key.public
    good = path.read_bytes()
    damaged = [good[:at] + bytes([good[at] ^ (1 << bit)]) + good[at + 1 :] for at in range(len(good)) for bit in range(8)]
    damaged += [good[:at] + good[at + 1 :] for at in range(len(good))]
    damaged += [good + row for row in (b"\n", good, *good.splitlines(keepends=True))]
    for content in damaged:
        path.write_bytes(content)
        assert any(path.name in problem for problem in checked(tmp_path / "copy", key).problems), content
    path.write_bytes(good)
    assert checked(tmp_path / "copy", key).problems == ()


def test_a_missing_and_an_added_file_are_named(made: tuple[Receipts, Path, Path], tmp_path: Path) -> None:
    receipts, all_, _ = made
    good = folders(all_)[0]
    for path in sorted(good.rglob("*")):
        if path.is_file() and path.name != "bagit.txt":
            name = str(path.relative_to(good))
            copy = tmp_path / path.name
            shutil.copytree(good, copy)
            (copy / name).unlink()
            assert any(name in problem for problem in checked(copy, receipts.key.public).problems)
    copy = tmp_path / "added"
    shutil.copytree(good, copy)
    (copy / "data/more.json").write_text("{}")
    (copy / "data/plan.json").unlink()
    (copy / "data/plan.json").symlink_to(good / "data/plan.json")
    problems = " ".join(checked(copy).problems)
    assert "data/more.json is not listed" in problems
    assert "data/plan.json cannot be read" in problems


def test_a_forger_with_a_key_of_his_own_is_found_out(made: tuple[Receipts, Path, Path], tmp_path: Path) -> None:
    """He may make everything fit; but not the key that the host publishes."""
    receipts, _, volume = made
    his = Receipts(tmp_path / "his", HostKey(tmp_path / "key", "kvm1"))
    job = job_of(his, volume, uuid4())
    his.make(job)
    with his.path_of(job.id).open("rb") as tar:
        folder = unpack(tar, tmp_path, f"receipt-{job.id}")
    assert checked(folder).problems == ()
    problems = checked(folder, receipts.key.public).problems
    assert any(receipts.key.public.fingerprint in problem for problem in problems)


def listed_again(folder: Path) -> None:
    """The manifests, of what is in the folder now: whoever changes a file can do that, too."""
    for manifest, files in (
        ("manifest-sha256.txt", sorted((folder / "data").iterdir())),
        (
            "tagmanifest-sha256.txt",
            sorted(path for path in folder.iterdir() if path.is_file() and "tagmanifest" not in path.name),
        ),
    ):
        rows = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in files]
        (folder / manifest).write_text("".join(rows))


def changed(path: Path, old: str, new: str) -> None:
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new, 1))


def test_a_forger_who_makes_the_manifests_anew_is_found_out(made: tuple[Receipts, Path, Path], tmp_path: Path) -> None:
    """Then all hashes of files are right, and it is the signatures alone that tell, each of them by itself."""
    receipts, all_, _ = made
    own, his = receipts.key, HostKey(tmp_path / "his.key", "kvm1")
    statement = (folders(all_)[0] / "data/statement.json").read_bytes()
    other = statement.replace(b'"name": "web"', b'"name": "db1"')
    assert other != statement
    sig, envelope, plan, signers = "statement.json.sig", "receipt.dsse.json", "data/plan.json", "allowed_signers"
    forgeries: list[tuple[Callable[[Path], object], set[str]]] = [
        (lambda folder: (folder / "data/statement.json").write_bytes(other), {sig, envelope}),
        (lambda folder: (folder / sig).write_text(own.sshsig(other)), {sig}),
        (lambda folder: (folder / sig).write_text(his.sshsig(statement)), {sig}),
        (lambda folder: (folder / envelope).write_text(own.dsse(other)), {envelope}),
        (lambda folder: (folder / envelope).write_text(his.dsse(statement)), {envelope}),
        (
            lambda folder: (folder / envelope).write_text(
                his.dsse(statement).replace(his.public.fingerprint, own.public.fingerprint)
            ),
            {envelope},
        ),
        (lambda folder: (folder / signers).write_text(his.allowed_signers), {signers}),
        (lambda folder: changed(folder / plan, "Cold", "Warm"), {plan}),
        (lambda folder: changed(folder / "data/disk0.sha256", "  0\n", "  1\n"), {"data/disk0.sha256"}),
        (lambda folder: (folder / "data/disk1.sha256").write_text(""), {"data/disk1.sha256"}),
        (lambda folder: changed(folder / "bagit.txt", "1.0", "0.9"), {"bagit.txt"}),
    ]
    for number, (forge, named) in enumerate(forgeries):
        folder = tmp_path / str(number)
        shutil.copytree(folders(all_)[0], folder)
        forge(folder)
        listed_again(folder)
        problems = checked(folder, own.public).problems
        files = (sig, envelope, plan, signers, "data/disk0.sha256", "data/disk1.sha256", "bagit.txt")
        assert {name for name in files if any(name in problem for problem in problems)} == named, (number, problems)
    assert checked(folders(all_)[0], own.public).problems == ()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a  0", "b  2"], "line 2 is not the hash of block 1"),
        (["a  0"], "has 1 hashes, and the volume 2 blocks"),
        (["a  0", "b  1", "c  2"], "line 3 is not the hash of block 2"),
        (["a  0", "b  01"], "line 2 is not the hash of block 1"),
    ],
)
def test_a_ledger_that_was_signed_and_is_none_of_its_disk_is_named(
    made: tuple[Receipts, Path, Path], tmp_path: Path, rows: list[str], message: str
) -> None:
    key = made[0].key
    lines = "".join(f"{row[0] * 64}{row[1:]}\n" for row in rows).encode()
    (tmp_path / "rows").write_bytes(lines)
    ledger = Ledger("data/disk0.sha256", tmp_path / "rows", hashlib.sha256(lines).hexdigest())
    disk = {"key": "disk-0", "size_bytes": BLOCK_BYTES + 1, "block_bytes": BLOCK_BYTES, "ledger": ledger.name}
    root = f"receipt-{UUID(int=1)}"
    write_bag(tmp_path / "tar", root=root, predicate={"volumes": [disk]}, plan=PLAN, ledgers=[ledger], key=key)
    with (tmp_path / "tar").open("rb") as tar:
        folder = unpack(tar, tmp_path / "out", root)
    assert [message in problem for problem in checked(folder, key.public).problems] == [True]


def test_a_flipped_byte_of_a_volume_is_named(made: tuple[Receipts, Path, Path], tmp_path: Path) -> None:
    receipts, all_, volume = made
    folder = folders(all_)[0]
    statement = checked(folder, receipts.key.public).statement
    assert statement is not None
    disk = volumes(statement)[0]
    content = bytearray(volume.read_bytes())
    chance, other = random.Random(5), tmp_path / "volume"
    for _ in range(12):
        at = chance.randrange(len(content))
        content[at] ^= 1 << chance.randrange(8)
        other.write_bytes(content)
        assert list(differing(folder, disk, open_reader(RawSpec(path=str(other))))) == [at // BLOCK_BYTES]
        content = bytearray(volume.read_bytes())
    other.write_bytes(content[:-1])
    with pytest.raises(MalformedArchive, match="the volume has"):
        list(differing(folder, disk, open_reader(RawSpec(path=str(other)))))


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        pytest.param(lambda all_: shutil.rmtree(folders(all_)[0]), "receipt 1 is missing", id="first"),
        pytest.param(lambda all_: shutil.rmtree(folders(all_)[1]), "receipt 2 is missing", id="middle"),
        pytest.param(lambda all_: shutil.copytree(folders(all_)[1], all_ / "receipt-x"), "are both receipt 2", id="twice"),
    ],
)
def test_what_is_missing_in_the_chain_is_named(
    made: tuple[Receipts, Path, Path], tmp_path: Path, damage: Callable[[Path], object], reported: str
) -> None:
    receipts, all_, _ = made
    shutil.copytree(all_, tmp_path / "all")
    damage(tmp_path / "all")
    assert any(reported in problem for problem in chained(tmp_path / "all", receipts.key.public))


def test_a_receipt_of_another_chain_is_named(made: tuple[Receipts, Path, Path], tmp_path: Path) -> None:
    """A host that made one again, in the place of one that it does not want to have made: those after it tell."""
    receipts, all_, volume = made
    other = Receipts(tmp_path / "other", receipts.key)
    shutil.copytree(all_, tmp_path / "all")
    for number in (1, 7):  # the first of them is another, and so the second
        job = job_of(other, volume, UUID(int=number))
        other.make(job)
    shutil.rmtree(folders(tmp_path / "all")[1])
    with other.path_of(UUID(int=7)).open("rb") as tar:
        unpack(tar, tmp_path / "all", f"receipt-{UUID(int=7)}")
    assert any("does not follow" in problem for problem in chained(tmp_path / "all", receipts.key.public))


def test_a_receipt_that_its_chain_does_not_have_is_named(made: tuple[Receipts, Path, Path], tmp_path: Path) -> None:
    """Else a folder of older receipts, with nothing missing, would vouch for one that is not in it."""
    receipts, all_, _ = made
    *older, newest = folders(all_)
    for folder in older:
        shutil.copytree(folder, tmp_path / "all" / folder.name)
    key = receipts.key.public
    assert chained(tmp_path / "all", key, older[0]) == chained(all_, key, newest) == []
    assert [newest.name in problem for problem in chained(tmp_path / "all", key, newest)] == [True]


def test_a_key_is_read_from_what_ssh_writes(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "id"], check=True, timeout=60)
    line = (tmp_path / "id.pub").read_text()
    key = PublicKey.from_signers(line)
    assert line.startswith(key.line)
    listed = subprocess.run(
        ["ssh-keygen", "-l", "-f", tmp_path / "id.pub"], check=True, timeout=60, capture_output=True, text=True
    )
    assert key.fingerprint in listed.stdout
    for wrong in ("", "ssh-rsa AAAA", line.replace("AAAAC3", "AAAAC4"), line + line):
        with pytest.raises(MalformedArchive):
            PublicKey.from_signers(wrong)
