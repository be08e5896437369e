"""Whether KVM works is found out by running a guest."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from synvirt.hypervisor import accel
from tests.needs import need
from tests.running.processes import command_line


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    need(accel.EMULATOR, "qemu-system-x86")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(accel, "_known", None)


def pretend_kvm(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """A /dev/kvm that is there, and a QEMU that does what the script says and counts how often it was run."""
    (folder / "bin").mkdir()
    emulator = folder / "bin" / accel.EMULATOR
    emulator.write_text(f"#!/bin/sh\necho run >> {folder / 'runs'}\n{script}\n")
    emulator.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(accel, "KVM_DEVICE", folder)
    return folder / "runs"


def test_the_probe_guest_runs_to_its_end_where_guests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "PROBE_LIMIT_S", 60)
    assert accel.boots_under("tcg") is None


def test_the_probe_guest_gets_through_long_mode(tmp_path: Path) -> None:
    """The count is in 64-bit code: a probe that ended before it would call a KVM good that stands still there."""
    image = tmp_path / "probe.img"
    counter = bytes.fromhex("b900e1f505")
    assert accel.PROBE_SECTOR.count(counter) == 1
    # The same guest, halted after its count: QEMU is still there, since the exit comes from long mode and nowhere else.
    image.write_bytes(accel.PROBE_SECTOR.replace(bytes.fromhex("b010e6f4"), bytes.fromhex("ebfe9090")))
    argv = [accel.EMULATOR, "-machine", "pc", "-accel", "tcg", "-m", "32", "-display", "none", "-no-reboot", "-nodefaults"]
    argv += ["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-drive", f"file={image},format=raw,if=ide"]
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(argv, timeout=3, check=False)


def test_answers_in_bounded_time_on_this_machine() -> None:
    began = time.monotonic()
    found = accel.accelerator()
    assert found.kind in ("kvm", "tcg")
    assert found.reason
    assert time.monotonic() - began < accel.PROBE_LIMIT_S + 60
    if found.kind == "kvm":
        assert accel.boots_under("kvm") is None


def test_no_device_needs_no_guest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = pretend_kvm(monkeypatch, tmp_path, "exit 33")
    monkeypatch.setattr(accel, "KVM_DEVICE", tmp_path / "nothing")
    assert accel.accelerator().kind == "tcg"
    assert not runs.exists()


def test_a_user_that_may_not_open_the_device_is_named_and_asked_again_in_its_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = pretend_kvm(monkeypatch, tmp_path, "exit 33")
    monkeypatch.setattr(accel, "_may_open", lambda: False)
    found = accel.accelerator()
    assert (found.kind, "usermod -aG kvm " in found.reason, runs.exists()) == ("tcg", True, False)
    monkeypatch.setattr(accel, "_may_open", lambda: True)
    monkeypatch.setattr(accel, "_known", None)
    assert accel.accelerator().kind == "kvm"


@pytest.mark.parametrize(
    ("script", "kind", "reason"),
    [
        ("exit 33", "kvm", "ran under KVM"),
        ("exit 0", "tcg", "before its guest"),
        ("echo 'Could not access KVM kernel module: Permission denied' >&2; exit 1", "tcg", "Permission denied"),
        ("exec sleep 60", "tcg", "did not end"),
    ],
)
def test_a_device_is_not_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, kind: str, reason: str) -> None:
    if "sleep" in script:
        monkeypatch.setattr(accel, "PROBE_LIMIT_S", 0.5)
    pretend_kvm(monkeypatch, tmp_path, script)
    found = accel.accelerator()
    assert found.kind == kind
    assert reason in found.reason


def test_a_probe_ends_though_its_service_was_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_kvm(monkeypatch, tmp_path, f"echo $$ > {tmp_path / 'pid'}; exec sleep 61")
    code = "from synvirt.hypervisor import accel; accel.PROBE_LIMIT_S = 3; accel.boots_under('kvm')"
    service = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 90
    while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    service.kill()
    service.wait()
    while command_line(int(pid)):  # empty for what is gone, and for a zombie that nobody waits for
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_one_probe_for_all_threads_and_the_next_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = pretend_kvm(monkeypatch, tmp_path, "sleep 0.2; exit 33")
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: accel.accelerator(tmp_path), range(8)))
    monkeypatch.setattr(accel, "_known", None)
    assert {*found, accel.accelerator(tmp_path)} == {accel.Accelerator("kvm", "a guest ran under KVM")}
    assert runs.read_text().count("run") == 1


def test_what_the_user_s_cache_knows_is_good_for_each_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = pretend_kvm(monkeypatch, tmp_path, "exit 33")
    accel.accelerator()
    for service in ("one", "another"):
        monkeypatch.setattr(accel, "_known", None)
        assert accel.accelerator(tmp_path / service).kind == "kvm"
    assert runs.read_text().count("run") == 1


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_kvm(monkeypatch, tmp_path, "exit 33")
    (tmp_path / "cache").touch()
    assert accel.accelerator().kind == "kvm"


@pytest.mark.parametrize("spoil", ["host", "kind", "text", "gone"])
def test_what_was_remembered_is_doubted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spoil: str) -> None:
    """Another boot of the host, another QEMU, a file that somebody broke."""
    runs = pretend_kvm(monkeypatch, tmp_path, "exit 33")
    accel.accelerator(tmp_path)
    kept = tmp_path / "accelerator.json"
    if spoil in ("host", "kind"):
        kept.write_text(json.dumps({**json.loads(kept.read_text()), spoil: "other"}))
    elif spoil == "text":
        kept.write_text("[1, {")
    else:
        kept.unlink()
    monkeypatch.setattr(accel, "_known", None)
    assert accel.accelerator(tmp_path).kind == "kvm"
    assert runs.read_text().count("run") == 2


def test_a_host_that_was_too_busy_to_tell_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not even a guest without KVM ran in time: the answer of that moment is not good until the host's next start."""
    busy = tmp_path / "busy"
    busy.touch()
    monkeypatch.setattr(accel, "PROBE_LIMIT_S", 0.3)
    pretend_kvm(monkeypatch, tmp_path, f"[ -e {busy} ] && exec sleep 60; exit 33")
    assert accel.accelerator(tmp_path).kind == "tcg"
    busy.unlink()
    monkeypatch.setattr(accel, "PROBE_LIMIT_S", 30)
    assert accel.accelerator(tmp_path).kind == "kvm"


@pytest.mark.parametrize("whom", ["$$", "$PPID"], ids=["QEMU", "its time limit"])
@pytest.mark.parametrize("sign", ["KILL", "TERM", "HUP"])
def test_a_probe_that_something_else_ended_says_nothing_of_kvm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sign: str, whom: str
) -> None:
    """By the kernel, as memory was short: guests ran without KVM until the host's next start."""
    ended = tmp_path / "ended"
    pretend_kvm(monkeypatch, tmp_path, f"[ -e {ended} ] || {{ touch {ended}; kill -{sign} {whom}; sleep 1; }}; exit 33")
    assert accel.accelerator(tmp_path).kind == "kvm"


def test_a_probe_that_something_ends_each_time_is_made_anew_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """QEMU itself takes SIGTERM as a request, and ends with 0."""
    short = tmp_path / "short"
    short.touch()
    said = f"echo '{accel.EMULATOR}: terminating on signal 15 from pid 1' >&2"
    runs = pretend_kvm(monkeypatch, tmp_path, f"[ -e {short} ] && {{ {said}; exit 0; }}; exit 33")
    found = accel.accelerator(tmp_path)
    assert (found.kind, "not known" in found.reason, runs.read_text().count("run")) == ("tcg", True, accel.TRIES)
    short.unlink()
    assert accel.accelerator(tmp_path).kind == "kvm"


def test_a_kvm_that_only_pretends_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(accel, "PROBE_LIMIT_S", 1)
    runs = pretend_kvm(monkeypatch, tmp_path, 'case "$*" in *"-accel kvm"*) exec sleep 60; esac; exit 33')
    found = accel.accelerator(tmp_path)
    monkeypatch.setattr(accel, "_known", None)
    assert (accel.accelerator(tmp_path), found.kind) == (found, "tcg")
    assert runs.read_text().count("run") == 2
