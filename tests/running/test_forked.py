"""A program that is forked from one that has its modules is what Python itself would have started."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.running import forked
from tests.running.processes import until

PROGRAM = """
import os, signal, sys, threading
print(sys.argv[1:], os.getcwd(), sorted(os.environ.items()), sys.stdin.read(), os.umask(0), __name__, sys.path[0])
print([fd for fd in range(3, 200) if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)])
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)])
print(threading.active_count(), signal.pthread_sigmask(signal.SIG_BLOCK, []), os.getsid(0) == os.getpid())
print("to the other", file=sys.stderr)
ENDS
"""
ENDS = (
    "",
    "sys.exit(3)",
    "sys.exit('no')",
    "raise KeyError('x')",
    "os._exit(7)",
    "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)",
    "raise KeyboardInterrupt",
)
# Modules of ours set these as they are loaded.
SET = {"OPENBLAS_NUM_THREADS": "1", "LIBVIRT_LOG_OUTPUTS": "4:file:/dev/null"}


@pytest.fixture
def outcome_of(tmp_path: Path) -> Any:
    def outcome_of(run: Any, ends: str) -> tuple[int, str, list[str]]:
        (tmp_path / "program.py").write_text(PROGRAM.replace("ENDS", ends))
        argv = [sys.executable, "-m", "program", "one", "two words"]
        environment = {"PATH": os.environ["PATH"], "SAYS": "x", "LANG": "C.UTF-8"} | SET
        done = run(argv, input="typed", capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
        # Of a traceback: which frames lie above the program's is no matter.
        lines = done.stderr.splitlines()
        return done.returncode, done.stdout, lines[:1] + lines[-1:]

    return outcome_of


@pytest.mark.parametrize("ends", ENDS)
def test_it_is_what_python_starts(outcome_of: Any, ends: str) -> None:
    assert outcome_of(forked.run, ends) == outcome_of(subprocess.run, ends)


def test_it_is_killed_waited_for_and_looked_at(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time; print('on', flush=True); time.sleep(60)")
    argv = [sys.executable, "-m", "program"]
    with forked.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert process.poll() == -signal.SIGKILL
    until(lambda: not Path(f"/proc/{process.pid}").exists())


def test_what_it_took_of_a_processor_is_known(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\nwhile time.process_time() < 0.3: pass")
    before = forked.processor_s()
    forked.run([sys.executable, "-m", "program"], cwd=tmp_path)
    assert 0.2 < forked.processor_s() - before < 2


STARTS = """
import subprocess, sys, time
from tests.running import forked
sleeps = [sys.executable, "-P", "-m", "timeit", "-n1", "-r1", "__import__('time').sleep(1)"]
print(forked.Popen(sleeps, stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(60)
"""


def test_others_are_forked_after_one_was_killed_that_had_others_forked(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STARTS)
    with forked.Popen([sys.executable, "-m", "program"], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        its_own = int(process.stdout.readline())
        process.kill()
    until(lambda: not Path(f"/proc/{its_own}").exists())
    (tmp_path / "program.py").write_text("")
    assert forked.run([sys.executable, "-m", "program"], cwd=tmp_path).returncode == 0


def test_a_shell_has_its_programs_forked_too(tmp_path: Path) -> None:
    """Each has the folder, the environment and the standard files that it is started with, and ends the shell as it ends."""
    lines = ["echo begun", "mkdir in && cd in", "synvirt --version | sed 's/^/piped: /' >&2", "synvirt nonsense || echo $?"]
    lines += ["SYNVIRT_DATA_DIR=. synvirt config show --json > shown", "synvirt nonsense", "echo never"]
    done = forked.in_shell("\n".join(lines), tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (2, "begun\n2\n")
    assert done.stderr.startswith("piped: ")
    assert str(tmp_path / "in") in (tmp_path / "in" / "shown").read_text()
