"""A monitor that is none, or that answers as no QEMU does: each is an error that names the VM and what came."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from synvirt.errors import SourceUnreachable
from synvirt.kvm import qmp
from synvirt.texts import json_bounded

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\n'
READY = b'{"return": {}}\n'


@contextmanager
def monitor(folder: Path, sent: bytes) -> Iterator[Path]:
    """A socket that sends this to its first client, at once, and reads until that one has gone."""
    path = folder / "100.qmp"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.settimeout(30)
        listening.listen()

        def serve() -> None:
            client, _ = listening.accept()
            with client, suppress(OSError):
                client.sendall(sent)
                while client.recv(4096):
                    pass

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield path
        finally:
            serving.join()


def test_events_between_question_and_answer_are_skipped(tmp_path: Path) -> None:
    sent = GREETING + READY + b'{"event": "STOP"}\n{"return": ["node"]}\n'
    with monitor(tmp_path, sent) as path, qmp.Qmp(path, "web01") as opened:
        assert opened.ask("query-named-block-nodes") == ["node"]


def test_what_qemu_refuses_is_an_error_with_its_words(tmp_path: Path) -> None:
    sent = GREETING + READY + json.dumps({"error": {"class": "GenericError", "desc": "no such node"}}).encode() + b"\n"
    with (
        monitor(tmp_path, sent) as path,
        qmp.Qmp(path, "web01") as opened,
        pytest.raises(qmp.QmpError, match="web01: QEMU refuses block-dirty-bitmap-add: no such"),
    ):
        opened.ask("block-dirty-bitmap-add", {"node": "x", "name": "y"})


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        pytest.param(b"SSH-2.0-OpenSSH_9.2\n", "does not use QMP", id="another-service"),
        pytest.param(b"[]\n", "does not use QMP", id="not-an-object"),
        pytest.param(b"[" * 4000 + b"\n", "does not use QMP", id="too-deep"),
        pytest.param(b'{"QMP": [' + b"1," * 5000 + b"1]}\n", "sends more than 5000 values in one line", id="too-many-values"),
        pytest.param(b"x" * 30_000, "sends more than 20000 bytes in one line", id="too-long"),
        pytest.param(b"", "sends nothing for 0 s", id="silent"),
    ],
)
def test_what_no_monitor_sends_is_an_error_that_says_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, said: str
) -> None:
    monkeypatch.setattr(json_bounded, "VALUES_MAX", 5000)
    monkeypatch.setattr(qmp, "LINE_BYTES_MAX", 20_000)
    monkeypatch.setattr(qmp, "GREETING_TIMEOUT_S", 0.2)
    with (
        monitor(tmp_path, sent) as path,
        pytest.raises(SourceUnreachable, match=f"^web01: its monitor {said}$"),
        qmp.Qmp(path, "web01"),
    ):
        pass


def test_a_socket_where_nothing_listens_is_a_vm_that_does_not_run_there(tmp_path: Path) -> None:
    with (
        pytest.raises(qmp.NoQemu, match="web01: its monitor cannot be reached: No such file"),
        qmp.Qmp(tmp_path / "no", "web01"),
    ):
        pass
