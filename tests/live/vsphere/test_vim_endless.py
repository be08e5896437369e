"""Answers of a vCenter without an end: too many bytes, packed ones, pages after pages."""

import gzip
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import SourceUnreachable
from synvirt.live import odd
from synvirt.live.odd import OddAnswer
from synvirt.live.vsphere import changes, tap
from synvirt.live.vsphere.session import VimSession
from synvirt.live.vsphere.tap import Bounded
from synvirt.transport.https import PlainConnection
from tests.transport.http_server import Server

_LIMIT = 10_000


class _Plain(PlainConnection):
    response_class = Bounded


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server(None)) as running:
        yield running


@pytest.fixture
def asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes, dict[str, str]], bytes]:
    monkeypatch.setattr(tap, "_ANSWER_MAX", _LIMIT)

    def ask(body: bytes, headers: dict[str, str]) -> bytes:
        server.reply = lambda request: server.send(request, 200, body, **headers)
        connection = _Plain("127.0.0.1", server.port, timeout=20)
        try:
            connection.request("POST", "/sdk")
            answer, found = connection.getresponse(), b""
            while piece := answer.read(1000):  # as an XML parser reads it
                found += piece
            return found
        finally:
            connection.close()

    return ask


def test_an_answer_has_a_limit_and_is_never_unpacked(asked: Callable[[bytes, dict[str, str]], bytes]) -> None:
    assert asked(b"x" * _LIMIT, {}) == b"x" * _LIMIT
    with pytest.raises(SourceUnreachable, match="more than"):
        asked(b"x" * (_LIMIT + 1), {})
    with pytest.raises(SourceUnreachable, match="packed"):
        asked(gzip.compress(bytes(1 << 20)), {"content-encoding": "gzip"})


def test_an_answer_that_is_read_at_once_has_the_same_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "_ANSWER_MAX", _LIMIT)
    for length, fits in ((_LIMIT, True), (_LIMIT + 1, False)):
        server.reply = lambda request: server.send(request, 200, b"x" * length)  # noqa: B023
        connection = _Plain("127.0.0.1", server.port, timeout=20)
        connection.request("POST", "/sdk")
        answer = connection.getresponse()
        if fits:
            assert len(answer.read()) == length
        else:
            with pytest.raises(SourceUnreachable):
                answer.read()
        connection.close()


@pytest.mark.parametrize("objects", [0, 3])
def test_pages_that_never_end_are_given_up(objects: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd, "OBJECTS_MAX", 20)
    one = SimpleNamespace(obj=SimpleNamespace(_moId="vm-1"), propSet=[])
    left = iter(range(100))

    def page(*_: Any) -> Any:
        return SimpleNamespace(objects=[one] * objects, token="more" if next(left, None) is not None else None)

    collector = SimpleNamespace(RetrievePropertiesEx=page, ContinueRetrievePropertiesEx=page)
    session: Any = SimpleNamespace(host="vc")
    with pytest.raises(OddAnswer, match="vc answers RetrievePropertiesEx with 21 objects"):
        VimSession._retrieved(session, SimpleNamespace(propertyCollector=collector), [])


def test_a_number_of_a_change_id_may_be_of_any_length() -> None:
    assert changes._number(f"52 de/{'9' * 5000}") == 0
    assert changes._number("52 de/17") == 17
