"""Checks of guests that booted: real sockets on this machine, which the guard lets these tests reach."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.errors import HypervisorAway, Internal
from synvirt.model.checks import Check
from synvirt.outgoing import Guard
from synvirt.proof.health import Checker
from tests.servers.certificates import self_signed

GUEST = UUID(int=1)
HERE = Guard(("127.0.0.0/8",))


class Guest:
    """`at`: what its agent tells of its addresses; `code`: how each program in it ends."""

    def __init__(self, *at: str, code: int = 0) -> None:
        self._at, self._code = list(at), code

    def addresses(self, uuid: UUID) -> list[str]:
        return self._at

    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int:
        match argv[0]:
            case "hangs":
                raise Internal(f"{argv[0]} did not end within {timeout_s:g} s")
            case "breaks":
                raise RuntimeError("a library of ours")
        return self._code


def port(number: int) -> Check:
    return Check(kind="port", port=number)


def page(url: str) -> Check:
    return Check(kind="http", url=url)


def command(*argv: str) -> Check:
    return Check(kind="command", argv=argv)


@contextmanager
def served(answer: Callable[[socket.socket], None], host: str = "127.0.0.1") -> Iterator[int]:
    """`answer` has each connection, until the block ends."""
    with socket.create_server((host, 0)) as server:
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError), server.accept()[0] as connection:
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            with contextlib.suppress(OSError):
                socket.create_connection(server.getsockname(), timeout=5).close()
            thread.join()


def answers(status: str, more: str = "") -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(f"HTTP/1.1 {status}\r\n{more}Content-Length: 0\r\n\r\n".encode())

    return answer


def says_nothing(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def drips(connection: socket.socket) -> None:
    """A header that never ends, a byte at a time: no single wait is long."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    connection.settimeout(0.02)
    while True:
        with contextlib.suppress(TimeoutError):
            if not connection.recv(4096):
                return
        connection.sendall(b"x")


def test_a_port_that_answers_at_one_of_the_guests_addresses() -> None:
    with socket.create_server(("127.0.0.3", 0)) as server:
        number = server.getsockname()[1]
        assert Checker(Guest("127.0.0.2", "127.0.0.3"), HERE).trouble(port(number), GUEST) is None
        trouble = Checker(Guest("127.0.0.2"), HERE).trouble(port(number), GUEST)
    assert f"port {number} does not answer" in (trouble or "")
    assert Checker(Guest(), HERE).trouble(port(80), GUEST) == "its agent reports no address of it"


def test_an_address_that_swallows_what_is_sent_to_it_leaves_time_for_the_next() -> None:
    """A full backlog: the kernel drops what comes beyond it, and who connects waits."""
    with socket.socket() as full, socket.create_server(("127.0.0.3", 0)) as server, contextlib.ExitStack() as stack:
        number = server.getsockname()[1]
        full.bind(("127.0.0.2", number))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(("127.0.0.2", number))
        assert Checker(Guest("127.0.0.2", "127.0.0.3"), HERE).trouble(port(number), GUEST, 1.0) is None


@pytest.mark.parametrize(
    ("status", "more", "trouble"),
    [
        ("200 OK", "", None),
        ("204 No Content", "", None),
        ("302 Found", "Location: http://169.254.169.254/\r\n", None),
        ("401 Unauthorized", "", "answers 401"),
        ("503 Service Unavailable", "", "answers 503"),
    ],
)
def test_a_page_is_judged_by_its_status(status: str, more: str, trouble: str | None) -> None:
    with served(answers(status, more)) as number:
        found = Checker(Guest(), HERE).trouble(page(f"http://127.0.0.1:{number}/health?deep=1"), GUEST)
    assert (found is None) is (trouble is None)
    assert (trouble or "") in (found or "")


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("answer", [says_nothing, drips])
def test_a_page_that_never_ends_its_answer_is_waited_for_no_longer_than_it_may(
    scheme: str, answer: Callable[[socket.socket], None]
) -> None:
    with served(answer) as number:
        found = Checker(Guest(), HERE).trouble(page(f"{scheme}://127.0.0.1:{number}/"), GUEST, 0.3)
    assert "127.0.0.1 does not answer" in (found or "")


def test_a_page_by_https_is_trusted_by_the_settings_authorities(tmp_path: Path) -> None:
    made = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            answers("200 OK")(secured)

    with served(answer) as number:
        check = page(f"https://127.0.0.1:{number}/")
        assert Checker(Guest(), HERE, made.certificate).trouble(check, GUEST) is None
        assert "certificate verify failed" in (Checker(Guest(), HERE).trouble(check, GUEST) or "")


def test_nobody_is_asked_whom_the_guard_refuses() -> None:
    """Its own addresses a guest tells us: it may not send us into our own house."""
    asked = threading.Event()
    with served(lambda connection: asked.set()) as number:
        for check in (port(number), page(f"http://127.0.0.1:{number}/"), page("http://169.254.169.254/latest")):
            assert "is not among the hosts that may be" in (Checker(Guest("127.0.0.1")).trouble(check, GUEST) or "")
        assert not asked.is_set()


def test_a_program_in_the_guest() -> None:
    assert Checker(Guest(), HERE).trouble(command("systemctl", "is-active", "app"), GUEST) is None
    assert Checker(Guest(code=3), HERE).trouble(command("systemctl"), GUEST) == "systemctl ended with 3"
    assert Checker(Guest(), HERE).trouble(command("hangs"), GUEST, 2.0) == (
        "its command check found: hangs did not end within 2 s"
    )
    assert Checker(Guest(), HERE).trouble(command("breaks"), GUEST) == "its command check broke: RuntimeError"


def test_a_libvirtd_that_is_away_says_nothing_of_the_guest() -> None:
    class Away(Guest):
        def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int:
            raise HypervisorAway("client socket is closed")

    with pytest.raises(HypervisorAway):
        Checker(Away(), HERE).trouble(command("true"), GUEST)
