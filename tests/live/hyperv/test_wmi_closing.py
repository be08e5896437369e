"""A session with a Hyper-V host ends, whatever its scripts do and whatever the host sends."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from synvirt.errors import Internal, SourceUnreachable, SynvirtError
from synvirt.live.hyperv import session as hyperv_session
from synvirt.live.hyperv.session import Address, Credentials, Session
from tests.fakes.hyperv.wsman import Wsman, served
from tests.running.processes import until
from tests.servers.remote_servers import Certificates, certificates
from tests.transport.http_server import colons

FOREVER = 1 << 40
EMPTY: dict[str, list[str]] = {"vms": []}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def control() -> Wsman:
    return Wsman(lambda *_: EMPTY, "u", "p")


@contextmanager
def _session(control: Wsman, made: Certificates) -> Iterator[Session]:
    with served(control, (str(made.certificate), str(made.key))) as port:
        session = Session(Address("127.0.0.1", port, fingerprint=colons(made.fingerprint)), Credentials("basic", "u", "p"))
        yield session
        session.close()


@pytest.mark.parametrize(("fault", "doing"), [("timed_out", "run"), ("silent", "open")])
def test_a_session_closes_though_a_host_never_comes_to_an_end(
    fault: str, doing: str, control: Wsman, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyperv_session, "CLOSE_WAIT_S", 0.1)
    failed = list[SynvirtError]()
    with _session(control, made) as session:
        if doing == "run":
            session.open()
        control.faults[fault] = FOREVER

        def run() -> None:
            try:
                session.run("list") if doing == "run" else session.open()
            except SynvirtError as error:
                failed.append(error)

        running = threading.Thread(target=run)
        running.start()
        until(lambda: control.faults[fault] < FOREVER)
        session.close()
        running.join()
        assert "was closed while" in failed[0].detail
        assert control.shells == {}
        control.faults.clear()
        session.open()
        assert session.run("list") == EMPTY


class _Clock:
    """Ten seconds pass with each look at it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 10.0
        return self.now_s


@pytest.mark.parametrize(
    ("fault", "times", "cause"), [("silent", 100, "did not open a session"), ("timed_out", 400, "did not end a script")]
)
def test_a_host_that_always_answers_not_yet_is_given_up(
    fault: str, times: int, cause: str, control: Wsman, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _session(control, made) as session:
        monkeypatch.setattr(hyperv_session, "clock", _Clock())
        if fault == "timed_out":
            session.open()
        control.faults[fault] = times
        with pytest.raises(SourceUnreachable, match=cause):
            session.run("list")
        assert control.shells == {}
        control.faults.clear()
        assert session.run("list") == EMPTY


def test_what_a_host_says_of_its_progress_counts_too(
    control: Wsman, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyperv_session, "ANSWER_BYTES_MAX", 200_000)
    with _session(control, made) as session:
        control.progress_chars = 10_000
        assert session.run("list") == EMPTY
        control.progress_chars = 300_000
        with pytest.raises(Internal, match="over 200000 bytes"):
            session.run("list")
        assert control.shells == {}
