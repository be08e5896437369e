"""What the tests are run by (make test)."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

# A grandchild whose parent is gone; the code is told to the caller.
ORPHANS = """
    import os, signal, subprocess, sys
    from pathlib import Path
    from tests.running.processes import until

    sleeping = ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]
    orphan = int(subprocess.run(sleeping, stdout=subprocess.PIPE, check=True).stdout)
    stat = Path(f"/proc/{orphan}/stat")
    until(lambda: int(stat.read_text().rpartition(")")[2].split()[1]) == os.getppid())
    os.kill(orphan, signal.SIGKILL)
    until(lambda: not stat.exists())
    sys.exit(7)
"""


def test_it_takes_in_orphans_buries_them_and_ends_as_the_tests_do() -> None:
    argv = [sys.executable, "-m", "tests.running.reaping", "-c", textwrap.dedent(ORPHANS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


BURNING = """
    import subprocess
    from pathlib import Path
    from tests.running.processes import until

    burning = ["sh", "-c", "python3 -c 'while __import__(\\"time\\").process_time() < 0.5: pass' >/dev/null 2>&1 & echo $!"]
    orphan = int(subprocess.run(burning, stdout=subprocess.PIPE, check=True).stdout)
    until(lambda: not Path(f"/proc/{orphan}").exists())
"""


def test_it_says_what_orphans_took_of_the_processors_too() -> None:
    argv = [sys.executable, "-m", "tests.running.reaping", "-c", textwrap.dedent(BURNING)]
    environment = os.environ | {"SAY_PROCESSORS": ""}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environment)
    programs, in_all = done.stderr.splitlines()
    found = re.fullmatch(r"(\d+\.\d) s of a processor in (\d+\.\d) s: \d+ % of \d+ cores", in_all)
    assert found, done.stderr
    assert float(found[1]) >= 0.5
    found = re.search(r"\bpython3 (\d+\.\d) s \(1\)", programs)
    assert found, done.stderr
    assert float(found[1]) >= 0.5
    assert re.search(r"\bthe tests \d+\.\d s \(1\)", programs)


LEAVING = """
    import subprocess
    # What it starts goes on in a session of its own, and so does what that starts.
    print(subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""


def test_what_the_tests_leave_is_gone_when_they_end() -> None:
    argv = [sys.executable, "-m", "tests.running.reaping", "-c", textwrap.dedent(LEAVING)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(ProcessLookupError):
        os.killpg(int(done.stdout), 0)
