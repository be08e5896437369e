"""A guest is held still by a process of its own, and thawed whatever becomes of who asked for it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.live import SourceAccess
from synvirt.live.proxmox.freeze import frozen
from tests.fakes.pve.cluster import Cluster, Paper
from tests.fakes.pve.server import PveServer
from tests.servers.libvirt_lab import until

_ASKS = """\
import json, sys
from synvirt.live import SourceAccess
from synvirt.live.proxmox.freeze import frozen
with frozen(SourceAccess(**json.loads(sys.argv[1])), "100") as hold:
    print(hold.quiet, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PveServer]:
    machines = Paper()
    machines.answers |= {"fsfreeze-freeze": 2, "fsfreeze-thaw": 2}
    cluster = Cluster(machines)
    cluster.add(100, agent="1")
    machines.start(100)
    with PveServer(cluster, tmp_path) as running:
        yield running
        assert running.wrong == []


def access(server: PveServer) -> SourceAccess:
    token = {"token_id": "mover@pve!synvirt", "token_secret": "t0ken"}
    return SourceAccess(server.endpoint, token, {"fingerprint_sha256": server.fingerprint})


def asked(server: PveServer) -> list[str]:
    return [path.rpartition("/")[2] for method, path, _ in list(server.asked) if method == "POST" and "/agent/" in path]


def test_it_is_thawed_at_the_end(server: PveServer) -> None:
    with frozen(access(server), "100") as hold:
        assert (hold.quiet, hold.lasted()) == (True, True)
        assert asked(server) == ["fsfreeze-freeze"]
    assert asked(server) == ["fsfreeze-freeze", "fsfreeze-thaw"]


def test_it_is_thawed_when_who_asked_is_killed(server: PveServer) -> None:
    given = access(server)
    order = json.dumps({"endpoint": given.endpoint, "credentials": dict(given.credentials), "options": dict(given.options)})
    child = subprocess.Popen([sys.executable, "-c", _ASKS, order], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "True"
    assert asked(server) == ["fsfreeze-freeze"]
    child.send_signal(signal.SIGKILL)
    child.communicate()
    until(lambda: asked(server) == ["fsfreeze-freeze", "fsfreeze-thaw"])


def test_a_thaw_that_fails_is_tried_again(server: PveServer) -> None:
    machines = server.cluster.machines
    assert isinstance(machines, Paper)
    with frozen(access(server), "100") as hold:
        assert hold.quiet
        del machines.answers["fsfreeze-thaw"]
        until_back = iter([False, True])

        class Answers(dict[str, object]):
            def __contains__(self, key: object) -> bool:
                return super().__contains__(key) or (key == "fsfreeze-thaw" and next(until_back, True))

            def __missing__(self, _key: str) -> int:
                return 2

        machines.answers = Answers(machines.answers)
    assert asked(server) == ["fsfreeze-freeze", "fsfreeze-thaw", "fsfreeze-thaw"]


@pytest.mark.parametrize("answer", [None, {"error": {"desc": "the command is disabled"}}])
def test_an_agent_that_refuses_is_no_failure(server: PveServer, answer: object) -> None:
    machines = server.cluster.machines
    assert isinstance(machines, Paper)
    machines.answers = {} if answer is None else {"fsfreeze-freeze": answer, "fsfreeze-thaw": 0}
    with frozen(access(server), "100") as hold:
        assert not hold.quiet
    assert "fsfreeze-freeze" in asked(server)
