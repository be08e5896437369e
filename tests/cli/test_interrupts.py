"""Ctrl-C at any moment: what is loading ends without a word, a command with 130, a service in order."""

import os
import pty
import signal
import subprocess
import sys
import termios
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.running.processes import until

# What starts as `synvirt` does, and is forked at each STEPth thing that Python does (sys.addaudithook: a module is imported, a
# file opened, a socket bound). The fork hears Ctrl-C at that moment; how it ended is a line of ENDS. In the command's own
# thread alone, as a fork has no other, and until the service itself listens.
FORKED = """
    import os, signal, sys, threading
    from synvirt.__main__ import main

    first, ends, step, number = threading.get_ident(), open(sys.argv.pop(1), "a"), int(sys.argv.pop(1)), 0

    def happened(event, arguments):
        global number
        heard_by = getattr(signal.getsignal(signal.SIGINT), "__module__", "")
        if threading.get_ident() != first or heard_by == "synvirt.api.server":
            return
        number += 1
        if number % step == 0:
            child = os.fork()
            if child == 0:
                number = float("-inf")
                os.kill(os.getpid(), signal.SIGINT)
                return
            ends.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n")
            ends.flush()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests had it ignored, perhaps
    sys.addaudithook(happened)
    main()
"""


@contextmanager
def forked(tmp_path: Path, step: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", textwrap.dedent(FORKED), str(tmp_path / "ends"), str(step), *arguments]
    with (tmp_path / "output").open("wb") as output, subprocess.Popen(argv, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.kill()


def ends(tmp_path: Path) -> set[int]:
    """How they ended, where all of them held their tongue."""
    output = (tmp_path / "output").read_text()
    for word in ("Traceback", "Exception ignored", "panicked", "Error"):
        assert word not in output
    found = (tmp_path / "ends").read_text().split()
    assert len(found) > 5
    return set(map(int, found))


def test_a_service_that_starts_ends_without_a_word_and_one_that_serves_in_order(tmp_path: Path) -> None:
    with forked(tmp_path, 1499, "serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0") as process:
        until(lambda: "SynVirt serves at" in (tmp_path / "output").read_text() or process.poll() is not None, 240)
        # By somebody who waits no longer, and says so again.
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, (tmp_path / "output").read_text()
    assert ends(tmp_path) <= {-signal.SIGINT, 130}


def test_a_command_ends_with_130_or_is_done(tmp_path: Path) -> None:
    image = tmp_path / "disk.raw"
    image.write_bytes(os.urandom(512))
    # Some 300 things happen in it.
    with forked(tmp_path, 23, "disk", "info", str(image)) as process:
        assert process.wait(240) == 0
    assert ends(tmp_path) <= {-signal.SIGINT, 130, 0}


# A command that loads a module, and Ctrl-C comes in the middle of that.
LOADING = """
    import signal, sys, time
    from synvirt.cli.interrupts import end_at_once, raised

    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_at_once()
    sys.path.append(sys.argv[1])
    try:
        with raised():
            import half
            print(half.WHOLE)
            time.sleep(240)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_a_module_is_loaded_whole_before_ctrl_c_is_heard(tmp_path: Path) -> None:
    """One in Rust panics on KeyboardInterrupt, and the next import of one in Python finds half of it."""
    (tmp_path / "half.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nWHOLE = 'whole'\n")
    argv = [sys.executable, "-c", textwrap.dedent(LOADING), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\ninterrupted\n", "")


# A module that frees an object when it is asked for WHOLE, and Ctrl-C comes in the finalizer.
FREEING = """
import os, signal

class Freed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def __getattr__(name):
    Freed()
    return "whole"
"""


def test_ctrl_c_in_a_finalizer_is_not_lost(tmp_path: Path) -> None:
    """Python drops what is raised there."""
    (tmp_path / "half.py").write_text(FREEING)
    argv = [sys.executable, "-c", textwrap.dedent(LOADING), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\ninterrupted\n", "")


def test_who_had_it_ignored_is_not_ended_by_it(tmp_path: Path) -> None:
    """As nohup does."""
    code = LOADING.replace("signal.default_int_handler", "signal.SIG_IGN").replace("240", "0")
    (tmp_path / "half.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nWHOLE = 'whole'\n")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\n", "")


def ended_at(prompt: bytes, number: int, *arguments: str) -> tuple[int, bool | None]:
    """The exit code of a command that gets the signal once its terminal shows the text, and whether the terminal shows what is
    typed then. SIGHUP: the terminal is closed, and nobody can see that any more."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started by nohup
        argv = [sys.executable, "-m", "synvirt", *arguments]
        os.execve(sys.executable, argv, {"PATH": os.environ["PATH"], "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)})
    output = b""
    while prompt not in output:
        output += os.read(terminal, 4096)
    if number == signal.SIGHUP:
        os.close(terminal)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), None
    os.kill(pid, number)
    with suppress(OSError):  # its end: EIO
        while part := os.read(terminal, 4096):
            output += part
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert b"Traceback" not in output
    shown = bool(termios.tcgetattr(terminal)[3] & termios.ECHO)
    os.close(terminal)
    return code, shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["INT", "TERM", "HUP"])
def test_a_signal_at_a_prompt_ends_the_command_with_its_number_and_the_terminal_shows_what_is_typed(
    tmp_path: Path, number: signal.Signals
) -> None:
    code, shown = ended_at(b"New password of eve", number, "--data-dir", str(tmp_path), "password", "eve")
    assert code == 128 + number
    assert shown is not False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["INT", "TERM", "HUP"])
def test_a_signal_leaves_nothing_of_a_conversion(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "disk.raw").write_bytes(b"\x5a" * (64 << 20))
    # It is at its first bytes, and then it has all of them to write and to read again.
    code, shown = ended_at(
        "→".encode(), number, *("disk", "convert", "--verify", str(tmp_path / "disk.raw"), str(tmp_path / "made.raw"))
    )
    assert code == 128 + number
    assert shown is not False
    assert [path.name for path in tmp_path.iterdir()] == ["disk.raw"]
