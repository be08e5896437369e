"""Whom the service speaks to because a caller asked it to: never itself, never the cloud's metadata, and no password astray."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from synvirt.errors import AuthFailed, BadRequest, DiskReadFailed, SourceUnreachable, SynvirtError
from synvirt.model.values import now
from synvirt.outgoing import Guard
from synvirt.remote import Remote, urls
from synvirt.remote.reading import RemoteReader
from synvirt.transport.tls import not_trusted
from tests.contracts.readers import read_all
from tests.servers import remote_servers as servers
from tests.servers.certificates import Certificate, tls_server

CONTENT = b"disk" * 100_000
NAME = "disk.raw"
BASIC = (("password", servers.PASSWORD), ("username", servers.USER))


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Nginx]:
    with servers.nginx(tmp_path_factory.mktemp("nginx")) as server:
        (server.folder / NAME).write_bytes(CONTENT)
        yield server


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "127.1",
        "2130706433",  # 127.0.0.1 as one number
        "0.0.0.0",
        "169.254.169.254",
        "::1",
        "::ffff:127.0.0.1",
        "168.63.129.16",
        "192.0.0.192",
        "fd20:ce::254",
        "64:ff9b:1::a9fe:a9fe",
        "2001:0:53aa:64c::a9fe",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "fe80::1",
        "fd00:ec2::254",
        "100.100.100.200",
        "224.0.0.1",
        "::",
    ],
)
def test_by_default_nobody_gets_at_this_host_or_its_cloud(host: str) -> None:
    with pytest.raises((BadRequest, SourceUnreachable)) as caught:
        Guard().addresses(host, 80)
    if isinstance(caught.value, SourceUnreachable):  # no address of that family here
        assert "not known" in caught.value.detail
    else:
        assert "remote_allowed_hosts" in (caught.value.hint or "")


@pytest.mark.parametrize("host", ["10.1.2.3", "192.168.7.7", "8.8.8.8", "2001:db8::7"])
def test_by_default_any_other_host_may_be_read_from(host: str) -> None:
    assert Guard().addresses(host, 80) == [host]


@pytest.mark.parametrize(
    ("allowed", "host", "may"),
    [
        (("10.0.0.0/8",), "10.9.9.9", True),
        (("10.0.0.0/8",), "11.0.0.1", False),
        (("10.0.0.5",), "10.0.0.5", True),
        (("localhost",), "localhost", True),  # the setting names it, so it is meant
        (("*.example",), "localhost", False),
        (("127.0.0.0/8", "::1"), "localhost", True),
        (("NAS.example",), "127.0.0.1", False),
    ],
)
def test_what_is_allowed_is_all_that_is(allowed: tuple[str, ...], host: str, may: bool) -> None:
    if may:
        assert Guard(allowed).addresses(host, 80)
    else:
        with pytest.raises(BadRequest, match="not among"):
            Guard(allowed).addresses(host, 80)


@pytest.mark.parametrize(
    ("host", "may"),
    [
        ("127.0.0.1", True),  # a tunnel ends here
        ("10.1.2.3", True),
        ("169.254.169.254", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("fe80::1", False),
        ("fd00:ec2::254", False),
        ("224.0.0.1", False),
    ],
)
def test_sources_and_peers_may_be_anywhere_but_where_metadata_are(host: str, *, may: bool) -> None:
    guard = Guard(setting="source_allowed_hosts")
    if may:
        guard.check_name(host)
        assert guard.addresses(host, 443) == [host]
        return
    for ask in (lambda: guard.check_name(host), lambda: guard.addresses(host, 443)):
        with pytest.raises(BadRequest) as caught:
            ask()
        assert "source_allowed_hosts" in (caught.value.hint or "")


def test_a_name_that_only_a_name_server_can_judge_passes_until_then() -> None:
    guard = Guard(("10.0.0.0/8",), "source_allowed_hosts")
    guard.check_name("localhost")
    with pytest.raises(BadRequest, match="not among"):
        guard.addresses("localhost", 443)
    with pytest.raises(BadRequest, match="not among"):
        Guard(("*.example",), "source_allowed_hosts").check_name("localhost")


def test_names_are_matched_whole() -> None:
    from synvirt.outgoing import _names

    assert _names("*.example", "a.example")
    assert _names("*.example", "A.b.EXAMPLE.")
    assert not _names("*.example", "example")
    assert not _names("*.example", "badexample")
    assert not _names("nas.example", "evil.nas.example")


def test_a_name_server_that_answers_differently_the_second_time_changes_nothing(
    nginx: servers.Nginx, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address that was checked is the one that is connected to."""
    real, names = socket.getaddrinfo, []

    def rebinding(host: str, *arguments: object, **named: object) -> object:
        if host == "rebinding.example":
            names.append(host)
            address = "127.0.0.1" if len(names) == 1 else "169.254.169.254"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, nginx.port))]
        return real(host, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    reader = RemoteReader(servers.remote(f"http://rebinding.example:{nginx.port}/open/"), NAME)
    assert read_all(reader) == CONTENT
    assert names == ["rebinding.example"]
    reader.close()


# ── redirects ────────────────────────────────────────────────────────────────────────────────────────────────────────


def url(nginx: servers.Nginx, folder: str) -> str:
    return f"http://127.0.0.1:{nginx.port}/{folder}/"


def test_a_redirect_on_the_same_host_keeps_the_password(nginx: servers.Nginx) -> None:
    reader = RemoteReader(servers.remote(url(nginx, "moved"), credentials=BASIC), NAME)
    assert read_all(reader) == CONTENT
    # Once it is known where it leads, nobody asks the way any more.
    lines = [line for line in nginx.requests() if line.startswith(f"GET /moved/{NAME}")]
    assert len(lines) == 1
    reader.close()


def test_a_redirect_to_another_origin_loses_it(nginx: servers.Nginx) -> None:
    reader = RemoteReader(servers.remote(url(nginx, "away"), credentials=BASIC), NAME)
    assert read_all(reader) == CONTENT
    reader.close()
    there = [line for line in nginx.requests() if line.endswith(str(nginx.elsewhere))]
    assert there
    assert all('"Basic' not in line for line in there)
    here = [line for line in nginx.requests() if "/away/" in line]
    assert here
    assert all('"Basic' in line for line in here)


@pytest.mark.parametrize(
    ("folder", "error", "words"),
    [
        ("metadata", BadRequest, "169.254.169.254"),
        ("share", BadRequest, "redirects to a smb URL"),
        ("round", DiskReadFailed, "more than 5 times"),
    ],
)
def test_redirects_that_are_not_followed(nginx: servers.Nginx, folder: str, error: type[SynvirtError], words: str) -> None:
    with pytest.raises(error, match=words):
        RemoteReader(servers.remote(url(nginx, folder), credentials=BASIC), NAME)


def test_no_redirect_from_https_to_http(nginx: servers.Nginx) -> None:
    remote = servers.remote(f"https://127.0.0.1:{nginx.tls_port}/downgrade/", fingerprint_sha256=nginx.certificates.fingerprint)
    with pytest.raises(BadRequest, match="in the clear"):
        RemoteReader(remote, NAME)


@pytest.mark.parametrize("status", [400, 403, 404])
def test_a_redirect_whose_target_lapses_is_asked_for_again(status: int) -> None:
    """What a store signs for a few minutes is signed again by the server that redirected there. Google's store, and S3 for keys
    that are lent for a while, say 400 then."""
    lapsed: set[str] = set()
    redirected = 0

    def script(request: servers.RangeRequest) -> tuple[int, dict[str, str], bytes]:
        nonlocal redirected
        path = request.path
        if path.startswith("/signed/"):
            if path in lapsed:
                return status, {"Content-Length": "0"}, b""
            return servers.honest(CONTENT, request)
        redirected += 1
        return 302, {"Location": f"/signed/{redirected}", "Content-Length": "0"}, b""

    with servers.scripted(script) as where:
        reader = RemoteReader(servers.remote(where), NAME)
        lapsed.add("/signed/1")
        assert read_all(reader) == CONTENT
        assert redirected >= 2
        reader.close()


@pytest.mark.parametrize(
    ("location", "asked"),
    [
        ("/disk ü.raw", "/disk%20%C3%BC.raw"),
        ("/disk.raw?name=ü&sig=a%2Fb+c==", "/disk.raw?name=%C3%BC&sig=a%2Fb+c=="),
    ],
)
def test_a_redirect_may_be_written_as_people_write_it(location: str, asked: str) -> None:
    """Servers send a name's bytes as they are; a URL has only ASCII."""
    paths: list[str] = []

    def script(request: servers.RangeRequest) -> tuple[int, dict[str, str], bytes]:
        paths.append(request.path)
        if request.path.endswith(f"/{NAME}"):
            return 302, {"Location": location.encode().decode("latin-1"), "Content-Length": "0"}, b""
        return servers.honest(CONTENT, request)

    with servers.scripted(script) as where:
        RemoteReader(servers.remote(where), NAME).close()
    assert paths[-1] == asked


def test_a_query_may_have_any_letters() -> None:
    paths: list[str] = []

    def script(request: servers.RangeRequest) -> tuple[int, dict[str, str], bytes]:
        paths.append(request.path)
        return servers.honest(CONTENT, request)

    with servers.scripted(script) as where:
        query = urls.parse(f"{where}{NAME}?file=ü&sig=a%2Fb+c==").query
        RemoteReader(servers.remote(where, query=query), NAME).close()
    assert paths[-1].endswith("?file=%C3%BC&sig=a%2Fb+c==")


def test_a_url_with_half_a_letter_is_refused() -> None:
    for url in ("https://nas.example/\udcff.ova", "https://nas.example/a.ova?\ud800"):
        with pytest.raises(BadRequest, match="malformed"):
            urls.parse(url)


# ── certificates ─────────────────────────────────────────────────────────────────────────────────────────────────────


def secure(nginx: servers.Nginx, host: str = "127.0.0.1", **fields: object) -> Remote:
    return servers.remote(f"https://{host}:{nginx.tls_port}/open/", **fields)


def test_a_place_without_tls_loads_no_authorities(nginx: servers.Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer to load than a small file to read."""
    loaded: list[object] = []
    monkeypatch.setattr("ssl.SSLContext.load_default_certs", lambda *asked: loaded.append(asked))
    with contextlib.closing(RemoteReader(servers.remote(f"http://127.0.0.1:{nginx.port}/open/"), NAME)) as reader:
        assert read_all(reader) == CONTENT
    assert loaded == []
    with pytest.raises(AuthFailed, match="is not trusted"):
        RemoteReader(secure(nginx), NAME)
    assert len(loaded) == 1


def test_certificates_are_verified(nginx: servers.Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = socket.getaddrinfo("127.0.0.1", nginx.tls_port, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_named: here)
    good = {
        "authority": secure(nginx, ca_file=str(nginx.certificates.authority)),
        "fingerprint": secure(nginx, fingerprint_sha256=nginx.certificates.fingerprint),
        "fingerprint, lower case": secure(nginx, fingerprint_sha256=nginx.certificates.fingerprint.lower()),
        "not at all": secure(nginx, verify_tls=False),
    }
    for remote in good.values():
        reader = RemoteReader(remote, NAME)
        assert read_all(reader) == CONTENT
        reader.close()
    other = servers.certificates(tmp_path)
    bad = {
        "unknown authority": secure(nginx),
        "another authority": secure(nginx, ca_file=str(other.authority)),
        "another fingerprint": secure(nginx, fingerprint_sha256=other.fingerprint),
        "another fingerprint, and nothing verified": secure(nginx, fingerprint_sha256=other.fingerprint, verify_tls=False),
        "another name": secure(nginx, "other.example", ca_file=str(nginx.certificates.authority)),
    }
    for why, remote in bad.items():
        with pytest.raises(AuthFailed) as caught:
            RemoteReader(remote, NAME)
        assert caught.value.hint, why
    with pytest.raises(SourceUnreachable, match="remote_ca_file"):
        RemoteReader(secure(nginx, ca_file=str(tmp_path / "gone.pem")), NAME)


@pytest.mark.parametrize(("ahead", "reason"), [(timedelta(days=900), "not yet valid"), (timedelta(days=-900), "expired")])
def test_a_certificate_outside_its_time_is_said_with_the_time_here(tmp_path: Path, ahead: timedelta, reason: str) -> None:
    """Before, the hint was to trust its authority, which is trusted, or to pin it: the clock of the host stayed wrong."""
    made = servers.certificates(tmp_path, ahead)
    web = tls_server(ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler), Certificate(made.key, made.certificate))
    serving = threading.Thread(target=web.serve_forever)
    serving.start()
    try:
        with pytest.raises(AuthFailed, match=reason) as caught:
            RemoteReader(servers.remote(f"https://127.0.0.1:{web.server_port}/", ca_file=str(made.authority)), NAME)
        assert f"this host's clock says {now():%Y}" in (caught.value.hint or "")
        assert "clock" in (not_trusted("vc1", caught.value.detail).hint or "")
    finally:
        web.shutdown()
        serving.join()
        web.server_close()


@pytest.mark.parametrize("way", ["http", "smb"])
def test_of_several_addresses_one_that_answers_is_enough(
    nginx: servers.Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A host with an address of IPv6 that leads nowhere from here, say."""
    real = socket.getaddrinfo

    def two(host: str, port: int, *arguments: object, **named: object) -> object:
        if host != "nas.example":
            return real(host, port, *arguments, **named)  # type: ignore[arg-type]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.7.7.7", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    if way == "http":
        reader = RemoteReader(servers.remote(f"http://nas.example:{nginx.port}/open/"), NAME)
        assert read_all(reader) == CONTENT
        reader.close()
        return
    with servers.samba(tmp_path) as samba:
        (samba.folder / NAME).write_bytes(CONTENT)
        credentials = (("password", servers.PASSWORD), ("username", "root"))
        reader = RemoteReader(servers.remote(f"smb://nas.example:{samba.port}/disks/", credentials=credentials), NAME)
        assert read_all(reader) == CONTENT
        reader.close()
