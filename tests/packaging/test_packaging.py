"""What a host is installed with: the unit, the sample settings."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from synvirt.cage.appliance import SHOWN_MODULES, shown_kernel
from synvirt.settings import Settings, load
from tests.needs import need

FOLDER = Path(__file__).parents[2] / "packaging"
UNIT = FOLDER / "systemd/synvirt.service"
HELPER, SOCKET = FOLDER / "systemd/synvirt-helper@.service", FOLDER / "systemd/synvirt-helper.socket"
SAMPLE = FOLDER / "synvirt.toml"
DECISION = FOLDER.parent / "docs/decisions/0013-who-root-is.md"


def test_the_sample_is_taken_and_says_what_it_means() -> None:
    settings = load(config=SAMPLE, environ={})
    assert (settings.auth, settings.libvirt_uri, settings.boot_timeout_s) == ("pam", "qemu:///system", 900)
    assert str(settings.data_dir) == "/var/lib/synvirt"


def test_what_is_commented_out_in_the_sample_is_taken_too(tmp_path: Path) -> None:
    """Whoever takes a `# ` away gets a setting that there is, and not a mistake."""
    text = re.sub(r"^# (?=\[|\w+ = )", "", SAMPLE.read_text(), flags=re.MULTILINE)
    (tmp_path / "synvirt.toml").write_text(text)
    settings = load(config=tmp_path / "synvirt.toml", environ={})
    assert settings.destinations_by_name.keys() == {"archive", "directory", "zfs"}
    assert settings.remote_allowed_hosts == ("*.storage.example", "10.0.0.0/8")
    assert settings.tls_key == Path("/etc/ssl/private/synvirt.key")
    shown = {
        f"{name}_{inner}" if isinstance(value, dict) and name != "destinations" else name
        for name, value in tomllib.loads(text).items()
        for inner in (value if isinstance(value, dict) else [""])
    }
    assert shown <= set(Settings.model_fields)


def _of(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def _unit() -> dict[str, list[str]]:
    return _of(UNIT)


def test_the_unit_may_write_the_sample_s_data_folder() -> None:
    assert str(load(config=SAMPLE, environ={}).data_dir) in _unit()["ReadWritePaths"]
    # TPMs and UEFI variables of guests are restored there, backups' sockets lie there.
    assert "-/var/lib/libvirt -/var/log/libvirt" in _unit()["ReadWritePaths"]
    assert _unit()["ProtectSystem"] == ["strict"]
    assert _unit()["PrivateTmp"] == ["true"]


def test_every_capability_of_the_unit_has_its_reason_and_no_other_is_named() -> None:
    reasons = re.findall(r"^#   ((?:CAP_\w+(?:, )?)+) +\S", UNIT.read_text(), re.MULTILINE)
    explained = {name for line in reasons for name in line.split(", ")}
    assert explained == set(_unit()["CapabilityBoundingSet"][0].split())


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    tool = need("systemd-analyze", "systemd")
    program = tmp_path / "synvirt"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    units = [tmp_path / unit.name for unit in (UNIT, SOCKET, HELPER)]
    for unit in units:
        text = (FOLDER / "systemd" / unit.name).read_text()
        unit.write_text(re.sub(r"^(ExecStart(?:Pre)?=\+?)\S+", rf"\g<1>{program}", text, flags=re.MULTILINE))
    done = subprocess.run([tool, "verify", "--man=false", *units[:2]], capture_output=True, text=True, timeout=60)
    assert "synvirt" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_limits_of_the_unit_have_their_reasons_beside_them() -> None:
    wanted = {"LimitCORE": "0", "TasksMax": "16384", "MemoryMax": "80%", "OOMPolicy": "continue", "LimitNOFILE": "65536"}
    assert {name: _unit()[name] for name in wanted} == {name: [value] for name, value in wanted.items()}
    lines = UNIT.read_text().splitlines()
    for name in ("LimitCORE", "TasksMax", "MemoryMax", "OOMPolicy"):
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{name}="))
        assert lines[at - 1].startswith("# "), name


def test_apparmor_takes_the_profile_that_the_unit_names() -> None:
    """By Debian's own parser; whether a kernel refuses what the service needs can only be seen on one that has AppArmor."""
    parser = need("apparmor_parser", "apparmor")
    profile = FOLDER / "apparmor/synvirt"
    ran = subprocess.run([parser, "-QTK", profile], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    names = subprocess.run([parser, "-N", profile], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert _unit()["AppArmorProfile"] == [f"-{names[0]}"]
    assert names == ["synvirt"]


def test_the_profile_allows_the_rights_that_the_unit_leaves_and_refuses_nothing_by_itself() -> None:
    text = (FOLDER / "apparmor/synvirt").read_text()
    allowed = {f"CAP_{name.upper()}" for name in re.findall(r"^  capability (\w+),$", text, re.MULTILINE)}
    # The two are held in a namespace of users alone: the network of a rehearsed guest.
    assert allowed == {*_unit()["CapabilityBoundingSet"][0].split(), "CAP_SYS_ADMIN", "CAP_NET_ADMIN"}
    # A deny holds in complain mode, too.
    assert not re.search(r"^\s*(audit )?deny ", text, re.MULTILINE)
    assert "flags=(complain," in text


def test_what_systemd_counts_has_its_reason_each_and_nothing_else_has_one() -> None:
    """The weights are those of the systemd that counts: only what is counted is compared."""
    tool = need("systemd-analyze", "systemd")
    done = subprocess.run(
        [tool, "security", "--offline=true", "--json=short", UNIT], capture_output=True, text=True, timeout=60, check=True
    )
    counted = {row["name"] for row in json.loads(done.stdout) if row["set"] is False and float(row["exposure"] or 0) > 0}
    rows = re.findall(r"^\| `([^`]+)` \| 0\.\d \| (\S.*) \|$", DECISION.read_text(), re.MULTILINE)
    assert {name.replace("\\|", "|") for name, _ in rows} == counted
    assert len(rows) == len(counted)


@pytest.mark.parametrize(("unit", "tenths"), [(UNIT, 30), (HELPER, 20)], ids=["service", "helper"])
def test_the_units_are_as_closed_as_they_are_said_to_be(unit: Path, tenths: int) -> None:
    """A line that goes, or that systemd does not know, shows here. Without any, it would be 9.6."""
    tool = need("systemd-analyze", "systemd")
    done = subprocess.run(
        [tool, "security", "--offline=true", f"--threshold={tenths}", unit], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout[-300:]


def test_modules_of_the_kernel_are_where_libguestfs_looks(tmp_path: Path) -> None:
    assert f"-/usr/lib/modules:{SHOWN_MODULES}" in _unit()["BindReadOnlyPaths"]
    modules, boot = tmp_path / "modules", tmp_path / "boot"
    assert shown_kernel(modules, boot) == {}
    boot.mkdir()
    for version in ("6.1.0-1", "6.1.0-2", "6.1.0-3"):
        (modules / version).mkdir(parents=True)
        (modules / version / "modules.dep").touch()
        (boot / f"vmlinuz-{version}").touch()
    (modules / "6.1.0-3/modules.dep").unlink()  # what a removed kernel leaves
    last = {"SUPERMIN_KERNEL": str(boot / "vmlinuz-6.1.0-2"), "SUPERMIN_MODULES": str(modules / "6.1.0-2")}
    assert shown_kernel(modules, boot) == last
    (modules / "6.1.0-1").rename(modules / os.uname().release)
    (boot / "vmlinuz-6.1.0-1").rename(boot / f"vmlinuz-{os.uname().release}")
    assert shown_kernel(modules, boot)["SUPERMIN_KERNEL"] == str(boot / f"vmlinuz-{os.uname().release}")


def test_the_service_is_not_root_and_asks_the_helper_by_the_socket_that_there_is() -> None:
    found, socket = _unit(), _of(SOCKET)
    assert found["User"] == found["Group"] == ["synvirt"]
    assert found["AmbientCapabilities"] == found["CapabilityBoundingSet"]
    assert f"SYNVIRT_HELPER_SOCKET={socket['ListenSequentialPacket'][0]}" in found["Environment"]
    assert (socket["SocketMode"], socket["SocketGroup"], socket["Accept"]) == (["0660"], ["synvirt"], ["yes"])
    for line in (found["ExecStartPre"][0], _of(HELPER)["ExecStart"][0]):
        assert line.endswith(" --config /etc/synvirt.toml --user synvirt"), line
        module = re.search(r"-m (synvirt\.\S+)", line)
        assert module is not None
        assert importlib.util.find_spec(module[1]) is not None


@pytest.mark.parametrize(
    ("changed", "anew", "in_place"),
    [
        ("pyproject.toml", False, True),
        ("packaging/launcher.py", False, True),
        ("requirements.txt", True, False),
        ("requirements-dev.txt", False, False),
    ],
)
def test_an_environment_is_made_anew_where_its_lock_file_has_changed_alone(
    tmp_path: Path, changed: str, anew: bool, in_place: bool
) -> None:
    """A service may run from it: all else is installed in place."""
    shutil.copy(FOLDER.parent / "Makefile", tmp_path)
    names = (
        "pyproject.toml",
        "requirements.txt",
        "requirements-dev.txt",
        "packaging/packages.txt",
        "packaging/packages-test.txt",
        "packaging/launcher.py",
    )
    for at, name in enumerate((*names, ".venv/.runtime", ".venv/.project", ".venv/.dev")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    assert "packaging/" not in _would_make(tmp_path)
    os.utime(tmp_path / changed)
    output = _would_make(tmp_path)
    assert ("make-venv.sh" in output, "install-project.sh" in output) == (anew, in_place)
    assert ("requirements-dev.txt" in output) is (anew or changed == "requirements-dev.txt")


def _would_make(folder: Path) -> str:
    return subprocess.run(["make", "-n", "setup-test"], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_an_environment_that_cannot_be_made_leaves_the_one_that_there_is(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/ours").touch()
    (tmp_path / "lock").write_text("there-is-none @ file:///nowhere --hash=sha256:" + "0" * 64)
    argv = [str(FOLDER / "make-venv.sh"), "venv", "lock"]
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PIP_NO_INDEX": "1"}
    )
    assert done.returncode != 0
    assert [path.name for path in (tmp_path / "venv").iterdir()] == ["ours"]


def test_the_first_make_says_what_it_does_and_how_long_it_takes() -> None:
    """Before anything is fetched: a minute without a word looks like a fault."""
    recipes = re.findall(r"^\$\(VENV\)/\.runtime:.*\n\t(.*)\n", (FOLDER.parent / "Makefile").read_text(), re.MULTILINE)
    assert len(recipes) == 1
    assert recipes[0].startswith("@echo")
    assert "minutes" in recipes[0]
    assert 'echo "Installing:$missing"' in (FOLDER / "install-packages.sh").read_text()
