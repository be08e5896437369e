"""Time stamps of receipts, by an authority of the test's own: `openssl ts` behind HTTP."""

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import UUID

import pytest
from typer.testing import CliRunner

from synvirt.cli import app
from synvirt.errors import Internal, MalformedArchive
from synvirt.proof import stamping
from synvirt.proof.keeping import MovedJob, Receipts
from synvirt.proof.signing import HostKey
from synvirt.proof.stamping import TimeStamps
from synvirt.proof.unpacking import unpack
from synvirt.proof.verifying import checked, stamped
from tests.needs import need

CONFIG = """
[tsa]
default_tsa = one
[one]
serial = {folder}/serial
crypto_device = builtin
signer_cert = {folder}/cert.pem
signer_key = {folder}/key.pem
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256
accuracy = secs:1
ess_cert_id_alg = sha256
[req]
distinguished_name = nothing
[nothing]
[root]
basicConstraints = critical, CA:TRUE
[own]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = critical, timeStamping
"""


class Authority:
    """`answers`: what it makes of a reply before it is sent."""

    def __init__(self, folder: Path, name: str) -> None:
        self.openssl = need("openssl", "openssl")
        self.folder = folder / name
        self.folder.mkdir()
        self.roots = self.folder / "root.pem"
        self.asked = 0
        self.answers: Callable[[bytes], tuple[int, bytes]] = lambda reply: (200, reply)
        (self.folder / "tsa.cnf").write_text(CONFIG.format(folder=self.folder))
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"]
        new = ["req", "-x509", "-config", f"{self.folder}/tsa.cnf", *key]
        root = ["-keyout", f"{self.folder}/root.key", "-out", str(self.roots), "-extensions", "root"]
        self._run(*new, "-subj", f"/CN={name} root", *root)
        own = ["-keyout", f"{self.folder}/key.pem", "-out", f"{self.folder}/cert.pem", "-extensions", "own"]
        self._run(*new, "-subj", f"/CN={name}", *own, "-CA", str(self.roots), "-CAkey", f"{self.folder}/root.key")

    def _run(self, *arguments: str) -> None:
        subprocess.run([self.openssl, *arguments], check=True, capture_output=True, timeout=60)

    def reply(self, query: bytes) -> bytes:
        (self.folder / "query").write_bytes(query)
        self._run("ts", "-reply", "-config", f"{self.folder}/tsa.cnf", "-queryfile", f"{self.folder}/query",
                  "-out", f"{self.folder}/reply")  # fmt: skip
        return (self.folder / "reply").read_bytes()

    @contextmanager
    def served(self) -> Iterator[str]:
        authority = self

        class Answer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                authority.asked += 1
                assert self.headers["Content-Type"] == "application/timestamp-query"
                status, reply = authority.answers(authority.reply(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/tsr?one"
            server.shutdown()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tsa"), "authority")


def receipt(folder: Path, stamps: TimeStamps | None, *, is_stamped: bool = False) -> tuple[Path, HostKey]:
    receipts, job_id = Receipts(folder / "kept", HostKey(folder / "key", "kvm1"), stamps), UUID(int=1)
    receipts.make(MovedJob(job_id, {"job": {"id": str(job_id), "name": "web"}}, b"{}\n", (), None))
    assert receipts.content(job_id).is_stamped is is_stamped
    assert receipts.content(job_id).statement["job"]["name"] == "web"
    with receipts.path_of(job_id).open("rb") as tar:
        return unpack(tar, folder / "unpacked", f"receipt-{job_id}"), receipts.key


def verify(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["receipt", "verify", *map(str, arguments)])
    return result.exit_code, result.stdout


def test_a_receipt_is_stamped_and_others_check_it_with_openssl(authority: Authority, tmp_path: Path) -> None:
    with authority.served() as url:
        folder, key = receipt(tmp_path, TimeStamps(url, authority.roots), is_stamped=True)
    assert checked(folder, key.public).problems == ()
    subprocess.run(
        [
            authority.openssl,
            "ts",
            "-verify",
            "-data",
            "data/statement.json",
            "-in",
            "statement.tsr",
            "-CAfile",
            authority.roots,
        ],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=60,
    )
    stamped_at = stamped(folder, authority.roots)
    assert stamped_at is not None
    assert stamped_at.endswith("GMT")
    code, reported = verify(folder, "--tsa-roots", authority.roots)
    assert code == 0
    assert f"It existed on {stamped_at}\n" in reported
    assert "an authority that is not checked" in verify(folder)[1]


def test_another_statement_another_authority_and_no_stamp_are_named(authority: Authority, tmp_path: Path) -> None:
    with authority.served() as url:
        folder, _ = receipt(tmp_path, TimeStamps(url, authority.roots), is_stamped=True)
    stranger = Authority(tmp_path, "stranger")
    with pytest.raises(MalformedArchive, match="not trusted"):
        stamped(folder, stranger.roots)
    code, reported = verify(folder, "--tsa-roots", stranger.roots)
    assert (code, "WRONG  the time stamp is not valid" in reported) == (1, True)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "data/statement.json").write_bytes((folder / "data/statement.json").read_bytes().replace(b"web", b"wex"))
    with pytest.raises(MalformedArchive, match="for something else"):
        stamped(other, authority.roots)
    (tmp_path / "plain").mkdir()
    plain, _ = receipt(tmp_path / "plain", None)
    assert stamped(plain, authority.roots) is None
    assert verify(plain)[0] == 0
    code, reported = verify(plain, "--tsa-roots", authority.roots)
    assert (code, "WRONG  the receipt has no time stamp" in reported) == (1, True)


def test_a_stamp_is_not_wrong_as_openssl_was_ended(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel, as memory was short: nothing was found out about it."""
    with authority.served() as url:
        folder, _ = receipt(tmp_path, TimeStamps(url, authority.roots), is_stamped=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/openssl").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "bin/openssl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    with pytest.raises(Internal, match="not checked: openssl was ended by SIGKILL"):
        stamped(folder, authority.roots)
    code, reported = verify(folder, "--tsa-roots", authority.roots)
    assert (code, "WRONG" in reported) == (1, False)


@pytest.mark.parametrize(
    "answer",
    [(500, b"sorry"), (200, b"<html>"), (200, b"0" * (stamping.REPLY_BYTES_MAX + 1)), (200, b"")],
    ids=["error", "page", "large", "empty"],
)
def test_a_wrong_answer_costs_the_stamp_and_not_the_receipt(
    answer: tuple[int, bytes], authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "answers", lambda reply: answer)
    with authority.served() as url:
        stamps = TimeStamps(url, authority.roots)
        folder, key = receipt(tmp_path, stamps)
        before = authority.asked
        assert stamps.of(b"the next one") is None
        assert authority.asked == before, "it is left alone for a while"
    assert checked(folder, key.public).problems == ()
    assert not (folder / "statement.tsr").exists()


def test_an_old_reply_and_one_of_another_authority_are_not_kept(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[bytes] = []

    def first(reply: bytes) -> tuple[int, bytes]:
        kept.append(reply)
        return 200, kept[0]

    monkeypatch.setattr(authority, "answers", first)
    with authority.served() as url:
        assert TimeStamps(url, authority.roots).of(b"once") == kept[0]
        assert TimeStamps(url, authority.roots).of(b"once") is None  # its number is that of another query
        assert len(kept) == 2
        monkeypatch.setattr(authority, "answers", lambda reply: (200, reply))
        assert TimeStamps(url, Authority(tmp_path, "stranger").roots).of(b"once") is None


def test_an_authority_that_is_away_or_silent_is_not_waited_for(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamping, "ASKED_FOR_S", 0.5)
    going_on = threading.Event()

    def silent(reply: bytes) -> tuple[int, bytes]:
        going_on.wait(60)
        return 200, reply

    monkeypatch.setattr(authority, "answers", silent)
    with authority.served() as url:
        assert TimeStamps(url, authority.roots).of(b"x") is None
        going_on.set()
    assert TimeStamps(url, authority.roots).of(b"x") is None  # nothing listens there any more
    assert TimeStamps("http://", authority.roots).of(b"x") is None


def test_a_thread_that_cannot_be_started_costs_the_stamp_and_not_the_receipt(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", full)
    stamps = TimeStamps("http://127.0.0.1:1", authority.roots)
    assert stamps.of(b"a statement") is None
