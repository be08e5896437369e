"""Outside programs: how they are run, listened to and stopped, and that none outlives the process that started it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from synvirt import programs
from synvirt.errors import Cancelled, Internal
from synvirt.programs import ProgramFailed, begin, output_of, run
from tests.running.processes import until


def test_what_a_program_says_is_returned() -> None:
    output = run(["sh", "-c", "echo out; echo err >&2"], timeout_s=20)
    assert (output.stdout, output.stderr) == ("out\n", "err\n")


@pytest.mark.parametrize("guarded", [False, True])
def test_a_bad_end_is_reported_with_its_words(guarded: bool) -> None:
    with pytest.raises(ProgramFailed, match="sh ended with 3: no such pool"):
        run(["sh", "-c", "echo no such pool >&2; exit 3"], timeout_s=20, guarded=guarded)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_program_that_takes_too_long_is_ended_with_its_children(tmp_path: Path, guarded: bool) -> None:
    with pytest.raises(ProgramFailed, match="took too long"):
        run(["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait"], timeout_s=3, guarded=guarded)
    assert_ends(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("guarded", [False, True])
def test_a_cancelled_program_is_ended(guarded: bool) -> None:
    with pytest.raises(Cancelled):
        run(["sleep", "600"], timeout_s=60, stop=lambda: True, guarded=guarded)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_program_that_no_signal_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, guarded: bool) -> None:
    """As one that waits in the kernel for a disk, for example zfs for a suspended pool."""
    kept: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(programs, "GONE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(programs, "_kill_group", kept.append)
    monkeypatch.setattr(programs._LifeLine, "cut", lambda _: None)
    with pytest.raises(ProgramFailed, match="sleep took too long"):
        run(["sleep", "600"], timeout_s=0.5, guarded=guarded, name="sleep")
    (child,) = kept
    assert child.poll() is None
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def test_who_has_a_file_open_is_ended_by_whichever_way_its_folder_is_named(tmp_path: Path) -> None:
    """The data folder may lie behind a link."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    with (tmp_path / "data" / "overlay").open("wb") as file, subprocess.Popen(["sleep", "600"], stdin=file) as child:
        programs.end_users(tmp_path / "data")
        try:
            assert child.wait(30) == -signal.SIGKILL
        finally:
            child.kill()


def test_a_user_of_a_folder_is_ended_though_it_closes_another_file_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterdir, listed = Path.iterdir, set[Path]()

    def with_one_more(path: Path) -> Iterator[Path]:
        """At the first look: a file that is closed before it is looked at itself."""
        if path not in listed:
            listed.add(path)
            yield path / "999999"
        yield from iterdir(path)

    monkeypatch.setattr(Path, "iterdir", with_one_more)
    with (tmp_path / "overlay").open("wb") as file, subprocess.Popen(["sleep", "600"], stdin=file) as child:
        try:
            programs.end_users(tmp_path)
            assert child.wait(30) == -signal.SIGKILL
        finally:
            child.kill()


def test_a_missing_program_is_named() -> None:
    with pytest.raises(Internal, match="the program no-such-program is not installed"):
        run(["no-such-program"], timeout_s=1)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_program_that_prints_without_end_is_ended(monkeypatch: pytest.MonkeyPatch, guarded: bool) -> None:
    monkeypatch.setattr(programs, "OUTPUT_BYTES_MAX", 1 << 20)
    with pytest.raises(ProgramFailed, match="sh printed over 1 MiB: it printed no message"):
        run(["sh", "-c", "exec yes"], timeout_s=600, guarded=guarded)
    assert len(run(["sh", "-c", "yes | head -c 1048576"], timeout_s=60, guarded=guarded).stdout) == 1 << 20


def test_output_is_text_whatever_its_bytes_and_line_ends() -> None:
    assert run(["printf", r"a\r\nb\rc\n\377\303\251"], timeout_s=20).stdout == "a\nb\nc\n\ufffdé"


def test_output_after_which_a_program_runs_on_is_kept() -> None:
    assert run(["sh", "-c", "echo out; exec >&-; sleep 0.3"], timeout_s=20, stop=lambda: False).stdout == "out\n"


def test_lines_are_reported_as_they_come(tmp_path: Path) -> None:
    """The program waits for what we do at its first line: if we got its lines at the end, it would never end."""
    seen: list[str] = []

    def on_line(line: str) -> None:
        seen.append(line)
        (tmp_path / "go").touch()

    script = f"echo first; while ! test -e {tmp_path}/go; do sleep 0.02; done; printf 'last without an end'"
    assert run(["sh", "-c", script], timeout_s=30, on_line=on_line).stdout == ""
    assert seen == ["first", "last without an end"]


def test_a_listener_that_fails_is_heard_once_the_program_has_ended() -> None:
    def on_line(_line: str) -> None:
        raise ValueError("no room for this line")

    with pytest.raises(ValueError, match="no room"):
        run(["sh", "-c", "yes | head -c 1000000"], timeout_s=30, on_line=on_line)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_program_ends_when_asking_whether_to_stop_fails(tmp_path: Path, guarded: bool) -> None:
    """Else its end would be waited for, without a limit."""

    def stop() -> bool:
        until((tmp_path / "pid").exists)
        raise OSError("the store does not answer")

    with pytest.raises(OSError, match="does not answer"):
        run(
            ["sh", "-c", f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 600"],
            timeout_s=600,
            stop=stop,
            guarded=guarded,
        )
    assert_ends(int((tmp_path / "pid").read_text()))


def test_a_program_ends_when_no_thread_can_read_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no file is closed that another thread opened meanwhile."""
    opened: list[int] = []

    def start(_thread: threading.Thread) -> None:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        run(["sleep", "600"], timeout_s=600, on_line=print)
    os.close(opened[0])


def test_a_program_ends_when_no_thread_can_watch_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    begun = begin(["sleep", "600"])
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"), output_of(begun, timeout_s=600):
        pytest.fail("nothing limits its time")
    assert begun.child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_guarded_program_and_its_children_end_with_their_parent(tmp_path: Path, sign: int) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/child.new; mv {tmp_path}/child.new {tmp_path}/child; wait"
    runner = subprocess.Popen(
        [sys.executable, "-c", f"from synvirt.programs import run; run(['sh', '-c', {script!r}], timeout_s=600, guarded=True)"]
    )
    try:
        until((tmp_path / "child").exists, 30)
    finally:
        runner.send_signal(sign)
        runner.wait()
    assert_ends(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_that_serves_ends_with_its_starter(tmp_path: Path, sign: int) -> None:
    """qemu-nbd ends with its last connection. One whose worker was killed before the first stayed forever, with its image."""
    code = f"""
import threading, time
from pathlib import Path
from synvirt.programs import start
begun = []
thread = threading.Thread(target=lambda: begun.append(start(["sleep", "600"], stderr=Path({str(tmp_path / "log")!r}))))
thread.start()
thread.join()
time.sleep(0.3)  # it stays though the thread that asked for it has ended
print(begun[0].pid, begun[0].poll(), flush=True)
time.sleep(600)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout is not None
        pid, ended = starter.stdout.readline().split()
    finally:
        starter.send_signal(sign)
        starter.communicate()
    assert ended == "None"
    assert_ends(int(pid))


@pytest.mark.parametrize("on_line", [None, print], ids=["its output is kept", "its lines are read"])
def test_a_program_ends_though_its_guard_was_killed(tmp_path: Path, on_line: Callable[[str], None] | None) -> None:
    """Its caller is told that it has ended, and removes or makes again what it still wrote."""
    script = f"echo $PPID $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; exec sleep 600"

    def kill_guard() -> None:
        until((tmp_path / "pids").exists, 30)
        os.kill(int((tmp_path / "pids").read_text().split()[0]), signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_guard)
        with pytest.raises(ProgramFailed, match="was ended by SIGKILL" if on_line else "took too long"):
            run(["sh", "-c", script], timeout_s=600 if on_line else 5, guarded=True, on_line=on_line)
        killed.result()
    assert_ends(int((tmp_path / "pids").read_text().split()[1]))


def test_a_daemon_left_behind_does_not_block_its_caller(tmp_path: Path) -> None:
    """As virt-v2v leaves a qemu-nbd behind when it fails."""
    with pytest.raises(ProgramFailed, match="no key"):
        run(["sh", "-c", f"setsid sleep 600 & echo $! > {tmp_path}/pid; echo no key >&2; exit 1"], timeout_s=60, on_line=print)
    pid = int((tmp_path / "pid").read_text())
    assert _lives(pid)
    os.kill(pid, signal.SIGKILL)
    assert_ends(pid)


def assert_ends(pid: int) -> None:
    until(lambda: not _lives(pid), 30)


def _lives(pid: int) -> bool:
    """A zombie whose parent does not reap it is dead enough."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
