"""A reader that is made to misbehave on purpose: in the cage each way fails, and what a copy needs goes on working."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from synvirt.cage import layers
from synvirt.doctor import CAGE_LAYERS
from synvirt.main.commands import _say_layers

# Run in a child: enters the cage that argv describes, then does one thing and prints the result.
CHILD = """
import ctypes, json, os, socket, subprocess, sys, threading
from synvirt.cage import Cage, Network, enter
cage = json.loads(sys.argv[1])
cage["network"] = Network[cage.get("network", "NONE")]
held = enter(Cage(**{key: tuple(value) if isinstance(value, list) else value for key, value in cage.items()}))
try:
    found = eval(sys.argv[2])
    print(json.dumps({"held": held, "found": str(found)}))
except BaseException as error:
    print(json.dumps({"held": held, "error": type(error).__name__}))
"""


def child(does: str, **cage: object) -> dict[str, object]:
    ran = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, json.dumps(cage), does], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


def needs(*names: str) -> None:
    missing = [name for name in names if not layers()[name]]
    if missing:
        pytest.fail(f"this host lacks {', '.join(missing)}: a kernel of 5.13 or newer with Landlock, on x86_64")


MISBEHAVIOUR = {
    "reads the password hashes": ("open('/etc/shadow').read()", "PermissionError"),
    "lists another's folder": ("os.listdir('/root')", "PermissionError"),
    "reads beside its file": ("open(os.path.dirname(cage['reads'][0]) + '/secret').read()", "PermissionError"),
    "reads what the service's memory has": ("open(f'/proc/{os.getppid()}/mem', 'rb').read(1)", "PermissionError"),
    "writes to its own source": ("open(cage['reads'][0], 'r+')", "PermissionError"),
    "writes elsewhere": ("open('/tmp/out-of-the-cage', 'w')", "PermissionError"),
    "connects out": ("socket.create_connection(('127.0.0.1', 9), 1)", "PermissionError"),
    "connects to a daemon of the host": (
        "socket.socket(socket.AF_UNIX).connect('/run/dbus/system_bus_socket')",
        "PermissionError",
    ),
    "opens a raw socket": ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "PermissionError"),
    "forks": ("os.fork()", "PermissionError"),
    "runs a program": ("subprocess.run(['/bin/true'])", "PermissionError"),
    "becomes a program": ("os.execv('/bin/true', ['true'])", "PermissionError"),
    "takes 16 GiB": ("bytearray(16 << 30)", "MemoryError"),
    "ends the service": ("os.kill(os.getppid(), 9)", "PermissionError"),
    "opens all the files there are": ("[open('/dev/null') for _ in range(9000)]", "OSError"),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaviour_fails(name: str, tmp_path: Path) -> None:
    needs("landlock", "seccomp")
    (tmp_path / "secret").write_text("of another job")
    own = tmp_path / "own"
    own.write_text("image")
    does, error = MISBEHAVIOUR[name]
    assert child(does, reads=[str(own)]).get("error") == error


def test_a_loop_without_end_is_ended() -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, json.dumps({"cpu_s": 1}), "[None for _ in iter(int, 1)]"],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode in (-signal.SIGXCPU, -signal.SIGKILL)


WORK = {
    "reads its file": ("open(cage['reads'][0]).read()", "image"),
    "writes its volume": ("open(cage['writes'][0], 'r+').write('x')", "1"),
    "starts threads": ("[t := threading.Thread(target=int, daemon=True), t.start()] and 1", "1"),
    "loads a library late": ("__import__('sqlite3').sqlite_version_info[0]", "3"),
    "asks whether its file is there": ("os.access(cage['reads'][0], os.R_OK)", "True"),
}


@pytest.mark.parametrize("name", WORK)
def test_what_a_copy_needs_goes_on_working(name: str, tmp_path: Path) -> None:
    own, volume = tmp_path / "own", tmp_path / "volume"
    own.write_text("image")
    volume.write_text("-")
    for path in (own, volume):
        path.chmod(0o600)
    tmp_path.chmod(0o700)
    does, found = WORK[name]
    assert child(does, reads=[str(own)], writes=[str(volume)]).get("found", "").endswith(found)  # type: ignore[attr-defined]


def test_programs_run_in_the_same_cage(tmp_path: Path) -> None:
    needs("landlock", "seccomp")
    (tmp_path / "own").write_text("image")
    run = "subprocess.run(['cat', {}], capture_output=True).stdout.decode() or 'nothing'"
    cage: dict[str, object] = {"reads": [str(tmp_path / "own")], "programs": True, "network": "LOCAL"}
    assert child(run.format(repr(str(tmp_path / "own"))), **cage)["found"] == "image"
    assert child(run.format("'/etc/shadow'"), **cage)["found"] == "nothing"


@pytest.mark.parametrize("programs", [False, True])
def test_calls_whose_flags_no_filter_can_read_seem_to_be_missing(programs: bool) -> None:
    """clone3 has its flags in memory: it could ask for namespaces."""
    needs("seccomp")
    does = "(ctypes.CDLL(None, use_errno=True).syscall(435, 0, 0), ctypes.get_errno())"
    assert child(does, programs=programs)["found"] == str((-1, errno.ENOSYS))


def test_a_program_starts_with_no_input_and_nobody_to_tell() -> None:
    """As those that readers start do: /dev/null is opened for reading and writing."""
    does = "subprocess.run(['cat'], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode"
    assert child(does, programs=True, network="LOCAL").get("found") == "0"


def test_a_network_reader_may_connect() -> None:
    found = child("socket.create_connection(('127.0.0.1', 9), 1)", network="ANY")
    assert found["error"] == "ConnectionRefusedError"


def test_one_that_stays_the_services_user_or_reads_from_elsewhere_reaches_no_daemon_of_this_host() -> None:
    """libvirtd asks the kernel who connects, and does what root or the service's user wants; others go by a socket's mode."""
    needs("seccomp")
    connects = "socket.socket({}).connect({})"
    local = connects.format("socket.AF_UNIX", "'/run/nobody-listens'")
    assert child(local, network="ANY", as_root=True)["error"] == "PermissionError"
    assert child(local, network="ELSEWHERE")["error"] == "PermissionError"
    assert child("socket.create_connection(('127.0.0.1', 9), 1)", network="ELSEWHERE")["error"] == "ConnectionRefusedError"
    assert child(local, network="ANY")["error"] == "FileNotFoundError"
    elsewhere = connects.format("socket.AF_INET", "('127.0.0.1', 9)")
    assert child(elsewhere, network="ANY", as_root=True)["error"] == "ConnectionRefusedError"


def test_every_layer_that_the_host_has_takes_hold() -> None:
    held = child("1")["held"]
    assert held == [name for name, there in layers().items() if there]
    assert set(layers()) == set(CAGE_LAYERS), "the doctor explains each"


def test_a_kernel_without_filters_lacks_only_that_layer() -> None:
    """It knows no such mode (prctl(2): EINVAL). Before, every reader failed there, and the doctor said that all holds."""
    script = """
from synvirt.cage import Cage, enter, layers, seccomp
seccomp._MODE_FILTER = 99
print(layers()["seccomp"], "seccomp" in enter(Cage()))
"""
    ran = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "False False\n"


def test_the_service_says_at_its_start_which_layers_there_are_and_which_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.cage.layers", lambda: {"seccomp": True, "landlock": False})
    with capture_logs() as lines:
        _say_layers()
    assert [(one["log_level"], one["layers"]) for one in lines] == [("info", ["seccomp"]), ("warning", ["landlock"])]
    assert lines[1]["hint"] == "synvirt doctor"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has privileges to drop")
def test_root_becomes_nobody() -> None:
    assert child("(os.geteuid(), os.getuid(), os.getgroups())")["found"] != str((0, 0, [0]))
    assert str(child("os.geteuid()")["found"]) != "0"


# The packaged service: a user of its own with these capabilities (packaging/systemd/synvirt.service).
GIVEN = "dac_override,+chown,+fowner,+setuid,+setgid,+kill"
AS_THE_SERVICE = (
    *("setpriv", "--reuid=64999", "--regid=64999", "--clear-groups", "--no-new-privs"),
    *(f"--inh-caps=-all,+{GIVEN}", f"--ambient-caps=-all,+{GIVEN}", f"--bounding-set=-all,+{GIVEN}", "--"),
)
STATE = "{line.split(':')[0]: line.split()[1] for line in open('/proc/self/status') if line.startswith(('Uid', 'Cap'))}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give capabilities")
@pytest.mark.parametrize("programs", [False, True])
def test_a_service_that_is_not_root_becomes_another_user_too(programs: bool, tmp_path: Path) -> None:
    needs("landlock", "seccomp")
    secret, own = tmp_path / "secret", tmp_path / "own"
    for path in (secret, own):
        path.write_text("root's")
        path.chmod(0o600)
    cage = json.dumps({"reads": [str(own)], "programs": programs})

    def run(does: str) -> dict[str, object]:
        argv = [*AS_THE_SERVICE, sys.executable, "-P", "-c", CHILD, cage, does]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        return dict(json.loads(ran.stdout))

    found = run(STATE)
    assert {"user", "capabilities", "landlock", "seccomp", "no_new_privs"} <= set(found["held"])  # type: ignore[call-overload]
    state = dict(eval(str(found["found"])))
    assert state["Uid"] not in ("0", "64999")
    kept = "0000000000000002"  # CAP_DAC_OVERRIDE
    nothing = "0000000000000000"
    assert (state["CapPrm"], state["CapEff"]) == (kept, kept)
    assert (state["CapInh"], state["CapAmb"]) == ((kept, kept) if programs else (nothing, nothing))
    assert run(f"open({str(own)!r}).read()")["found"] == "root's"
    assert run(f"open({str(secret)!r}).read()")["error"] == "PermissionError"
    assert run("os.kill(os.getppid(), 0)")["error"] == "PermissionError"
    assert run("os.setuid(0)")["error"] == "PermissionError"
    assert run("open(f'/proc/{os.getppid()}/mem', 'rb').read(1)")["error"] == "PermissionError"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give capabilities")
@pytest.mark.parametrize("service", [(), AS_THE_SERVICE], ids=["root's", "the package's"])
def test_what_it_makes_as_the_service_is_the_services(service: tuple[str, ...], tmp_path: Path) -> None:
    """Another user in all but files: signals, other processes and its name to daemons are those of the other user."""
    needs("landlock", "seccomp")
    owner = 64999 if service else 0
    folder = tmp_path / "repository"
    folder.mkdir(mode=0o700)
    os.chown(folder, owner, owner)
    cage = json.dumps({"writes": [str(folder)], "files_as_service": True, "network": "LOCAL"})

    def run(does: str) -> dict[str, object]:
        argv = [*service, sys.executable, "-P", "-c", CHILD, cage, does]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        return dict(json.loads(ran.stdout))

    made = folder / "by-a-thread"
    a_thread = f"[t := threading.Thread(target=lambda: open({str(made)!r}, 'w').close()), t.start(), t.join()] and os.getuid()"
    found = run(a_thread)
    assert found["found"] not in (str(owner), "0")
    assert {"user", "capabilities"} <= set(found["held"])  # type: ignore[call-overload]
    status = made.stat()
    assert (status.st_uid, status.st_gid) == (owner, owner)
    assert run(f"os.chmod({str(made)!r}, 0o600)")["found"] == "None"
    state = dict(eval(str(run(STATE)["found"])))
    assert int(state["CapPrm"], 16) & ~0b110 == 0, "no right but to open what belongs to others"
    peer = "[pair := socket.socketpair(), pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)][1][4:8]"
    uid = str(int(str(found["found"])).to_bytes(4, "little"))
    assert run(peer)["found"] == uid, "as daemons see it"
    assert run("os.kill(os.getppid(), 0)")["error"] == "PermissionError"
    assert run("open(f'/proc/{os.getppid()}/mem', 'rb').read(1)")["error"] == "PermissionError"
    assert run("os.setuid(0)")["error"] == "PermissionError"
    made.write_text("of the service")
    cage = json.dumps({**json.loads(cage), "programs": True})
    assert run(f"subprocess.run(['cat', {str(made)!r}], capture_output=True).stdout.decode()")["found"] == "of the service"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give capabilities")
def test_within_a_namespace_of_users_the_cage_is_entered_too() -> None:
    """The network of a rehearsed guest, where the service is not root: what is in there has all rights, over nothing."""
    namespaces = "assert ctypes.CDLL(None).unshare(0x10000000 | 0x40000000) == 0\n"
    code = CHILD.replace("held = enter", f"{namespaces}held = enter")
    argv = [*AS_THE_SERVICE, sys.executable, "-P", "-c", code, json.dumps({"network": "ANY"}), STATE]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert {"capabilities", "no_new_privs", "seccomp"} <= set(found["held"])
    assert dict(eval(found["found"]))["CapEff"] == "0000000000000006"
