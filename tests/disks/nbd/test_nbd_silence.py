"""Waits that only the other side's bytes would end."""

import socket
import threading

from synvirt.disks.nbd.silence import Watch
from tests.running.processes import until


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def test_a_silent_connection_is_ended() -> None:
    near, far = connected()
    watch = Watch(0.2)
    with near, far:
        with watch.over(near.fileno()) as ended:
            assert near.recv(1) == b""
            assert ended()
        # The thread looks at the next wait, too.
        near, other = connected()
        with near, other, watch.over(near.fileno()) as ended:
            assert near.recv(1) == b""
            assert ended()
    watch.close()


def test_a_slow_connection_is_not_ended() -> None:
    near, far = connected()
    watch = Watch(30.0)
    with near, far, watch.over(near.fileno()) as ended:
        (wait,) = watch._waits
        wait.since -= 60  # a minute ago
        far.sendall(b"1")
        assert near.recv(1) == b"1"
        wait.end_if_silent(30.0)
        assert not ended()
        far.sendall(b"2")
        assert near.recv(1) == b"2"
    watch.close()


def test_its_thread_goes_with_it() -> None:
    near, far = connected()
    watch = Watch(1e6)  # it looks once a day: a close that waited for that would not end
    with near, far, watch.over(near.fileno()):
        assert any(thread.name == "silence" for thread in threading.enumerate())
        until(lambda: watch._changed._waiters)  # type: ignore[attr-defined]
    watch.close()
    assert watch._thread is not None
    assert not watch._thread.is_alive()
