"""What only root may do: the same in this process and by root's helper, and what the helper refuses."""

import fcntl
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from synvirt.errors import Internal
from synvirt.privileged import Privileged
from synvirt.privileged import helper as helper_module
from synvirt.privileged.asking import ByHelper
from synvirt.privileged.helper import CALLS, REQUEST_BYTES_MAX, Refused, Rules, called, rules_of, serve
from synvirt.privileged.here import Here
from tests.needs import need, need_root
from tests.privileged.helpers import helper

PASSWORD = "S3cret: ü"
NAME = f"svtest{os.getpid()}"
OUTSIDER = f"svother{os.getpid()}"


@pytest.fixture(scope="module")
def accounts() -> Iterator[None]:
    """Two accounts of this host with one password: one in the group that the settings name, one in none."""
    need_root("accounts of the host")
    for program in ("useradd", "chpasswd", "userdel"):
        need(program, "passwd")
    with (Path(tempfile.gettempdir()) / "synvirt-accounts.lock").open("w") as lock:
        # One worker after another: all of them have these names from the process that collected the tests.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _made()


def _made() -> Iterator[None]:
    try:
        for name in (NAME, OUTSIDER):
            subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", name], check=True, timeout=30)
            subprocess.run(["chpasswd"], input=f"{name}:{PASSWORD}\n".encode(), check=True, timeout=30)
        yield
    finally:
        for name in (NAME, OUTSIDER):
            subprocess.run(["userdel", name], check=False, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("etc") / "synvirt.toml"
    path.write_text(f'auth = "pam"\npam_viewer_group = "{NAME}"\n')
    path.chmod(0o644)
    return path


@pytest.fixture(scope="module")
def by_helper(accounts: None, config: Path) -> Iterator[Path]:
    # Not below pytest's own folder: the next pytest that starts on this machine closes that one to other users.
    with tempfile.TemporaryDirectory(prefix="synvirt-helper-") as folder, helper(Path(folder), config) as path:
        for above in (path.parent, *path.parent.parents):
            above.chmod(above.stat().st_mode | 0o001)  # another user connects, too
        yield path


# ── the contract ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["here", "by helper"])
def privileged(request: pytest.FixtureRequest, accounts: None, by_helper: Path) -> Privileged:
    return Here("login") if request.param == "here" else ByHelper(by_helper)


def test_the_right_password_is_right(privileged: Privileged) -> None:
    assert privileged.authenticate(NAME, PASSWORD) is True


@pytest.mark.parametrize(
    ("user", "password"),
    [(NAME, "wrong"), (NAME, ""), ("", ""), ("nobody-of-that-name", PASSWORD), ("nobody", "")],
    ids=["wrong", "empty", "nothing", "no account", "an account without one"],
)
def test_a_wrong_one_is_wrong(privileged: Privileged, user: str, password: str) -> None:
    assert privileged.authenticate(user, password) is False


# ── the helper alone ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_account_of_no_group_cannot_log_in(by_helper: Path) -> None:
    """Else who has the service could guess root's password."""
    assert Here("login").authenticate(OUTSIDER, PASSWORD) is True
    assert ByHelper(by_helper).authenticate(OUTSIDER, PASSWORD) is False


@pytest.mark.parametrize("password", ["", "right", "p" * 1024], ids=["empty", "short", "long"])
@pytest.mark.parametrize("user", ["root", "nobody", "nobody-of-that-name"])
def test_pam_is_asked_once_whatever_the_name_is(user: str, password: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time of an answer shows who is in a group. The password of an account of none is never tried."""
    asked_for: list[tuple[str, str]] = []

    class Pam:
        def __init__(self, service: str) -> None:
            pass

        def authenticate(self, user: str, password: str) -> bool:
            asked_for.append((user, password))
            return True

    monkeypatch.setattr(helper_module, "Here", Pam)
    monkeypatch.setattr(helper_module, "WRONG_PAUSE_S", 0.0)
    member = user == "root"
    assert helper_module.authenticate(Rules("login", ("root",)), user, password) == {"right": member}
    [(asked_name, tried)] = asked_for
    assert (asked_name, tried == password) == (user, member)
    assert len(tried) >= len(password)


# Without a module of ours: another user may not get to where they lie.
ASK = """
import json, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(30)
connection.connect(sys.argv[1])
try:
    connection.send(json.dumps({"call": "authenticate", "user": sys.argv[2], "password": sys.argv[3]}).encode())
    print(connection.recv(4096).decode())
except (ConnectionResetError, BrokenPipeError):
    print('{"error": "closed"}')
"""


@pytest.mark.parametrize(
    ("uid", "answers"),
    [(65534, ({"right": True},)), (64998, ({"error": "this is the service's own helper"}, {"error": "closed"}))],
    ids=["the service's user", "another's"],
)
def test_the_kernel_says_who_asks(by_helper: Path, uid: int, answers: tuple[dict[str, object], ...]) -> None:
    """Two processes of two users, as on an appliance; the service's is no root and gains nothing.

    Another's request is not read: where it came before the connection was closed, the kernel resets it.
    """
    argv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--bounding-set=-all", "--"]
    argv += ["/usr/bin/python3", "-I", "-c", ASK, str(by_helper), NAME, PASSWORD]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) in answers


def asked(path: Path, message: bytes, descriptors: tuple[int, ...] = ()) -> dict[str, object]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        if descriptors:
            socket.send_fds(connection, [message], list(descriptors))
        else:
            connection.send(message)
        return dict(json.loads(connection.recv(4096)))


def call(**fields: object) -> bytes:
    return json.dumps(fields).encode()


REFUSED: dict[str, bytes] = {
    "nothing": b"{}",
    "no call": call(user=NAME, password=PASSWORD),
    "another call": call(call="open", path="/etc/shadow"),
    "a call of Python's": call(call="__class__"),
    "no password": call(call="authenticate", user=NAME),
    "one argument more": call(call="authenticate", user=NAME, password=PASSWORD, service="other"),
    "rules of its own": call(call="authenticate", user=NAME, password=PASSWORD, rules="x"),
    "a number": call(call="authenticate", user=NAME, password=1),
    "a list": call(call="authenticate", user=[NAME], password=PASSWORD),
    "a call that is a list": call(call=["authenticate"], user=NAME, password=PASSWORD),
    "a name twice": b'{"call": "authenticate", "user": "a", "user": "b", "password": "c"}',
    "a NUL": call(call="authenticate", user=f"{NAME}\0", password=PASSWORD),
    "half a character": b'{"call": "authenticate", "user": "\\ud800", "password": "x"}',
    "a long name": call(call="authenticate", user="u" * 257, password="x"),
    "a long password": call(call="authenticate", user=NAME, password="p" * 1025),
    "no JSON": b"\xff\xfe\x00",
    "a list alone": b"[]",
    "deep": b"[" * 10_000,
    "infinity": b'{"call": Infinity}',
    "one byte too much": call(call="authenticate", user=NAME, password=PASSWORD).ljust(REQUEST_BYTES_MAX + 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_call_is_refused(by_helper: Path, name: str) -> None:
    answer = asked(by_helper, REFUSED[name])
    assert list(answer) == ["error"]
    assert PASSWORD not in str(answer)


def test_descriptors_are_not_taken(by_helper: Path) -> None:
    message = call(call="authenticate", user=NAME, password=PASSWORD)
    with open("/dev/null") as file:
        assert list(asked(by_helper, message, (file.fileno(), file.fileno()))) == ["error"]


def test_one_that_says_nothing_holds_up_nobody(by_helper: Path) -> None:
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(8)]
    try:
        for one in silent:
            one.connect(str(by_helper))
        assert ByHelper(by_helper).authenticate(NAME, PASSWORD) is True
    finally:
        for one in silent:
            one.close()


def test_ten_thousand_broken_messages_are_all_refused_or_answered() -> None:
    """Nothing but `Refused` and an answer comes out of them; PAM is asked for none but whole calls."""
    random_ = random.Random(14)
    whole = call(call="authenticate", user="u", password="p")
    seen: list[tuple[str, str]] = []
    was = CALLS["authenticate"]

    def note(rules: Rules, user: str, password: str) -> dict[str, object]:
        seen.append((user, password))
        return {"right": False}

    calls = {"authenticate": (was[0], note)}
    refused = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helper_module, "CALLS", calls)
        for _ in range(10_000):
            message = bytearray(whole)
            for _ in range(random_.randint(1, 6)):
                at = random_.randrange(len(message) + 1)
                match random_.randrange(3):
                    case 0:
                        message[at:at] = random_.randbytes(random_.randint(1, 4))
                    case 1:
                        del message[at : at + random_.randint(1, 4)]
                    case _:
                        message[at : at + 1] = random_.choice(b'{}[]":,\\u0n').to_bytes()
            try:
                assert called(bytes(message), lambda: Rules("login", ())) == {"right": False}
            except Refused:
                refused += 1
    assert refused + len(seen) == 10_000
    assert refused > 9_000
    assert all(isinstance(one, str) for pair in seen for one in pair)


# ── root's settings ──────────────────────────────────────────────────────────────────────────────────────────────────


def _others(path: Path) -> None:
    need_root("a file of another's")
    os.chown(path, 65534, 65534)


def _link(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.chmod(0o666),
        lambda path: path.chmod(0o660),
        _others,
        _link,
        _fifo,
        lambda path: path.unlink(),
        lambda path: path.write_text("pam_service ="),
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.write_text("pam_admin_group = 1"),
        lambda path: path.write_text("# " + "x" * (1 << 20)),
    ],
    ids=["all write", "a group writes", "another's", "a link", "a fifo", "gone", "no TOML", "no UTF-8", "a number", "large"],
)
def test_settings_that_could_be_another_s_are_not_taken(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "synvirt.toml"
    path.write_text("")
    path.chmod(0o640)
    assert rules_of(path) == Rules("login", ())
    spoil(path)
    with pytest.raises(Refused):
        rules_of(path)


def test_settings_are_read_as_the_service_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "synvirt.toml"
    path.write_text('pam_admin_group = "a"\n[pam]\nservice = "other"\nviewer_group = "v"\n')
    path.chmod(0o640)
    assert rules_of(path) == Rules("other", ("a", "v"))


# ── the service's side ───────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_helper_it_is_said_what_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(Internal, match="does not answer") as raised:
        ByHelper(tmp_path / "nothing.sock").authenticate("u", "p")
    assert raised.value.hint is not None
    assert "synvirt-helper.socket" in raised.value.hint


@pytest.mark.parametrize("answer", [b"", b"\xff", b"[]", b'{"error": "no"}'])
def test_an_answer_that_is_none_is_no_log_in(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "helper.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(1)
        pid = os.fork()
        if pid == 0:
            connection, _ = listener.accept()
            connection.recv(REQUEST_BYTES_MAX)
            if answer:
                connection.send(answer)
            os._exit(0)
        with pytest.raises(Internal, match="root's helper"):
            ByHelper(path).authenticate("u", "p")
        os.waitpid(pid, 0)


def test_the_kernel_says_who_the_caller_is_before_a_byte_is_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        serve(theirs, allowed=frozenset({os.geteuid() + 1}), rules=lambda: pytest.fail("its settings were read"))
        assert json.loads(ours.recv(4096)) == {"error": "this is the service's own helper"}


def test_it_imports_neither_the_api_nor_a_parser_of_ours() -> None:
    code = "import sys, synvirt.privileged.helper; print(sorted(name for name in sys.modules if name.startswith('synvirt')))"
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == [
        *("['synvirt',", "'synvirt.privileged',", "'synvirt.privileged.helper',", "'synvirt.privileged.here']"),
    ]
