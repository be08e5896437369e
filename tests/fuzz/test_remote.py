"""Servers that answer anything at all: the file's own bytes, or our error; never another exception, never other bytes."""

import contextlib
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import MalformedArchive, SynvirtError
from synvirt.remote import places, retrying, s3
from synvirt.remote.reading import RemoteReader, names
from tests.cases import cases
from tests.contracts.readers import read_all
from tests.servers import remote_servers as servers

CONTENT = Random(22).randbytes(300_000)
NUMBERS = st.sampled_from(["0", "1", "299999", "300000", "300001", "65535", "-1", "9" * 30, "x", "", "٣"])
HEADERS = {
    "Content-Range": st.builds("bytes {}-{}/{}".format, NUMBERS, NUMBERS, NUMBERS | st.just("*"))
    | st.sampled_from(["bytes */0", "bytes */300000", "items 0-1/2", ""]),
    "Content-Length": NUMBERS,
    "Transfer-Encoding": st.sampled_from(["chunked", "gzip", ""]),
    "Content-Encoding": st.sampled_from(["gzip", "identity", "br"]),
    "ETag": st.sampled_from(['"a"', 'W/"a"', '"', "", '"b"']),
    "Last-Modified": st.sampled_from(["", "yesterday", "Fri, 01 Jan 2010 00:00:00 GMT"]),
    "Location": st.sampled_from(["", "/other", "//[", "http://127.0.0.1:1/", "ftp://x/", "https://", "data:,x", "http://a b/"]),
    "Retry-After": st.sampled_from(["0", "-5", "", "tomorrow", "0.1", "Fri, 01 Jan 2010 00:00:00 GMT", "Fri, 99 Foo"]),
    "Connection": st.sampled_from(["close", "keep-alive"]),
}
STATUSES = st.sampled_from([200, 204, 206, 206, 206, 301, 302, 304, 307, 400, 401, 403, 404, 412, 416, 429, 500, 503, 599])
CHANGES = st.fixed_dictionaries({}, optional={name: values | st.none() for name, values in HEADERS.items()})


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retrying, "PAUSES_S", (0.0,) * 2)
    monkeypatch.setattr("synvirt.remote.http.READ_TIMEOUT_S", 2.0)
    yield
    assert places._connections == {}


@given(
    answers=st.lists(st.tuples(STATUSES | st.none(), CHANGES, st.integers(-5, 5) | st.just(-(1 << 30))), min_size=1, max_size=4)
)
@cases(50)
def test_any_answers(answers: list[tuple[int | None, dict[str, str | None], int]]) -> None:
    def script(request: servers.RangeRequest) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = servers.honest(CONTENT, request)
        drawn, changes, length = answers[(request.number - 1) % len(answers)]
        for name, value in changes.items():
            headers.pop(name, None)
            if value is not None:
                headers[name] = value.encode("utf-8").decode("latin-1")
        body = body[: max(0, len(body) + length)] if length <= 0 else body + b"?" * length
        return drawn or status, headers, body

    with servers.scripted(script) as url:
        try:
            reader = RemoteReader(servers.remote(url), "x")
        except SynvirtError:
            return
        try:
            content = read_all(reader)
        except SynvirtError:
            return
        finally:
            reader.close()
        # A server that lies about the size from the first answer on is believed: it has no other file.
        assert content == CONTENT[: len(content)]


@given(page=st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
@cases(25)
def test_any_list_of_a_bucket(page: bytes) -> None:
    whole = b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Contents><Key>a</Key>' + page

    for body in (page, whole, whole + b"</Contents></ListBucketResult>"):

        def script(request: servers.RangeRequest, body: bytes = body) -> tuple[int, dict[str, str], bytes]:
            return 200, {"Content-Length": str(len(body))}, body

        with servers.scripted(script) as url, contextlib.suppress(MalformedArchive):
            names(servers.remote("s3://bucket/", endpoint=url))


def test_a_bomb_of_a_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_PAGE_MAX_BYTES", 1000)
    bomb = b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">]><x>&a;</x>'
    for body in (bomb, b"<x>" + b"y" * 5000 + b"</x>"):
        with (
            servers.scripted(lambda request, body=body: (200, {"Content-Length": str(len(body))}, body)) as url,  # type: ignore[misc]
            pytest.raises(SynvirtError, match="not a list of S3"),
        ):
            names(servers.remote("s3://bucket/", endpoint=url))
