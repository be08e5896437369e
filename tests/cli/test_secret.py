"""How a command comes by a secret: really in a process of its own, with and without a terminal."""

import os
import pty
import subprocess
import sys
import termios
import time

import pytest

SECRET = "s3cret of a peer"
ASKS = 'from synvirt.cli.secret import secret; print("got", secret("The peer\'s password", variable="SYNVIRT_PEER_PASSWORD"))'


def alone(typed: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a session of its own: no terminal is at hand."""
    argv = [sys.executable, "-W", "error", "-c", ASKS]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SYNVIRT_")} | environment
    return subprocess.run(argv, input=typed, env=environ, capture_output=True, text=True, start_new_session=True, check=False)


@pytest.mark.parametrize(
    ("typed", "environment"),
    [
        ("", {"SYNVIRT_PEER_PASSWORD": SECRET}),
        (f"{SECRET}\nthe rest of a document", {}),
        (SECRET, {"SYNVIRT_PEER_PASSWORD": ""}),
    ],
)
def test_without_a_terminal_it_is_of_the_environment_or_the_first_line(typed: str, environment: dict[str, str]) -> None:
    done = alone(typed, **environment)
    assert (done.stdout, done.stderr) == (f"got {SECRET}\n", "")


@pytest.mark.parametrize("typed", ["", "\n"])
def test_nobody_gave_one(typed: str) -> None:
    done = alone(typed)
    assert done.returncode != 0
    assert "BadRequest: The peer's password is missing" in done.stderr
    assert "GetPassWarning" not in done.stderr


@pytest.mark.timeout(60)
def test_a_terminal_asks_though_the_standard_input_is_a_document() -> None:
    """`cat plan.json | synvirt migrations submit - --server …`: the plan has been read by then."""
    pid, terminal = pty.fork()
    if pid == 0:
        end, start = os.pipe()
        os.close(start)
        os.dup2(end, 0)
        os.execve(sys.executable, [sys.executable, "-c", ASKS], {"PATH": os.environ["PATH"], "TERM": "dumb"})
    # What is typed before the prompt hides it would be thrown away.
    while termios.tcgetattr(terminal)[3] & termios.ECHO:
        time.sleep(0.01)
    shown = b""
    os.write(terminal, f"{SECRET}\n".encode())
    while f"got {SECRET}".encode() not in shown:
        shown += os.read(terminal, 4096)
    assert shown.count(SECRET.encode()) == 1, "what is typed is not shown"
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)
