"""The Debian package: built, put into a root folder of the test's own by dpkg, run from there, removed and purged; and its
scripts at an upgrade.

PACKAGE: the file of one that this checkout has been built into already, as CI has: then none is built."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from synvirt.settings import load
from tests.needs import need, need_root

ROOT = Path(__file__).parents[2]
HOME = "usr/lib/synvirt"


def dpkg(root: Path, *arguments: str | Path) -> str:
    """Dependencies are the host's: in a bare folder there are none. Its scripts run here, and are told where the root is."""
    argv = ["dpkg", f"--root={root}", "--force-depends", "--force-script-chrootless", "--force-unsafe-io", *arguments]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=300, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_package_from_its_build_to_its_purge(tmp_path: Path) -> None:
    """One test, since it is built for half a minute."""
    need("dpkg-deb", "dpkg")
    need_root("dpkg sets owners")
    package = Path(os.environ["PACKAGE"]) if "PACKAGE" in os.environ else built(tmp_path / "built")
    says_what_it_is(package)
    root = tmp_path / "root"
    for name in ("info", "updates", "triggers"):
        (root / "var/lib/dpkg" / name).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    assert "installed and not started" in dpkg(root, "--install", package)
    is_whole(root)
    runs(root, tmp_path)
    unit_and_settings(root)
    lists_what_it_is_made_of(root)
    leaves_what_was_not_its_own(root)


def built(folder: Path) -> Path:
    """Its size proves nothing: as little is compressed as can be."""
    done = subprocess.run(
        [ROOT / "packaging/build-deb.sh", folder],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"DPKG_DEB_COMPRESSOR_LEVEL": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (package,) = folder.iterdir()
    assert done.stdout.strip() == str(package)
    return package


def control(package: Path, field: str) -> str:
    return subprocess.run(["dpkg-deb", "--field", package, field], capture_output=True, text=True, check=True).stdout.strip()


def says_what_it_is(package: Path) -> None:
    """And wants what `make setup` installs."""
    assert control(package, "Version") in (ROOT / "pyproject.toml").read_text()
    wanted = re.findall(r"^([\w.+-]+)", (ROOT / "packaging/packages.txt").read_text(), re.MULTILINE)
    depends = control(package, "Depends").split(", ")
    assert set(wanted) - {"python3-venv"} == {one for one in depends if "(" not in one}
    assert {"python3 (>= 3.11)", "python3 (<< 3.12)"} <= set(depends)


def runs(installed: Path, folder: Path) -> None:
    """With Debian's Python, its own packages and no others: this checkout is not among them."""
    script = (installed / HOME / "bin/synvirt").read_text()
    assert script.startswith(f"#!/{HOME}/bin/python3 -SP\n")
    assert str(installed) not in script
    assert (installed / "usr/bin/synvirt").resolve() == (installed / HOME / "bin/synvirt").resolve()
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder)}
    python = installed / HOME / "bin/python3"

    def run(*arguments: str) -> str:
        done = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=120, env=environ, cwd=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run("-m", "synvirt", "--version").startswith("synvirt ")
    code = "import synvirt, numpy, libvirt, nbd, sys; print(synvirt.__file__, numpy.__file__, sys.prefix, sep='\\n')"
    assert {str(installed / HOME)} == {line[: len(str(installed / HOME))] for line in run("-c", code).splitlines()}
    assert run("-m", "synvirt", "serve", "--help")


def is_whole(installed: Path) -> None:
    """Every file is as it was packed, is no other user's, and says nothing of where it was built."""
    sums = (installed / "var/lib/dpkg/info/synvirt.md5sums").read_text().splitlines()
    assert len(sums) > 1000
    names = set()
    for digest, name in (line.split(maxsplit=1) for line in sums):
        content = (installed / name).read_bytes()
        assert hashlib.md5(content, usedforsecurity=False).hexdigest() == digest, name
        assert str(ROOT).encode() not in content, name
        names.add(name)
        found = (installed / name).stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o022) == (0, 0, 0), name
    assert {
        f"{HOME}/pyvenv.cfg",
        "lib/systemd/system/synvirt.service",
        "etc/synvirt/synvirt.toml",
        "etc/apparmor.d/synvirt",
    } <= names
    assert {Path(name).parts[0] for name in names} == {"usr", "lib", "etc"}
    assert any(name.endswith("synvirt/main/__pycache__/running.cpython-311.pyc") for name in names), (
        "the service could not write it"
    )


def lists_what_it_is_made_of(installed: Path) -> None:
    """Each locked package, with the hashes that it may have; and no other."""
    sbom = json.loads((installed / "usr/share/doc/synvirt/sbom.cdx.json").read_text())
    assert (sbom["bomFormat"], sbom["metadata"]["component"]["name"]) == ("CycloneDX", "synvirt")
    locked = dict(re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    assert {one["name"]: one["version"] for one in sbom["components"]} == locked
    assert all(one["externalReferences"][0]["hashes"] for one in sbom["components"])


def unit_and_settings(installed: Path) -> None:
    """They name what it installs."""
    unit = (installed / "lib/systemd/system/synvirt.service").read_text()
    assert "ExecStart=/usr/bin/synvirt serve --config /etc/synvirt/synvirt.toml\n" in unit
    units = installed / "lib/systemd/system"
    for text in (unit, *((units / name).read_text() for name in ("synvirt-helper.socket", "synvirt-helper@.service"))):
        for path in re.findall(r"file://(\S+)|^Exec\w+=\+?(/\S+)", text, re.MULTILINE):
            assert (installed / "".join(path).lstrip("/")).exists(), path
        assert "/opt/" not in text
        assert "/etc/synvirt.toml" not in text
    settings = load(config=installed / "etc/synvirt/synvirt.toml", environ={})
    assert str(settings.data_dir) == "/var/lib/synvirt"
    assert (installed / "etc/synvirt/synvirt.toml").stat().st_mode & 0o777 == 0o640


def leaves_what_was_not_its_own(installed: Path) -> None:
    data, config = installed / "var/lib/synvirt", installed / "etc/synvirt/synvirt.toml"
    data.mkdir()
    (data / "migrator.db").write_text("jobs")
    config.write_text('auth = "file"\n')
    dpkg(installed, "--remove", "synvirt")
    assert config.read_text() == 'auth = "file"\n'
    assert not (installed / HOME).exists()
    assert "/var/lib/synvirt stays" in dpkg(installed, "--purge", "synvirt")
    assert (data / "migrator.db").read_text() == "jobs"
    assert not (installed / "etc/synvirt").exists()
    assert not (installed / "usr/bin/synvirt").exists()


# ── an upgrade ───────────────────────────────────────────────────────────────────────────────────────────────────────

SYSTEMCTL = """#!/bin/sh
case "$*" in
is-active*) test -e "$PROOF/active" ;;
*" synvirt.service") echo "$1 $(cat "$PROOF/installed")" >> "$PROOF/said"; test "$1" != start || touch "$PROOF/active" ;;
esac
"""


def a_package(folder: Path, proof: Path, name: str, version: str, file: str = "installed") -> Path:
    """One file, which has its version, and our scripts."""
    tree = folder / f"{name}-{version}"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: tests <root@localhost>\nDescription: a test\n"
    )
    if name == "synvirt":
        for script in ("preinst", "postinst", "prerm", "postrm"):
            shutil.copy(ROOT / "packaging/deb" / script, tree / "DEBIAN" / script)
            (tree / "DEBIAN" / script).chmod(0o755)
    for one in {"installed", file} if name == "synvirt" else {file}:
        packed = tree / str(proof / one).lstrip("/")
        packed.parent.mkdir(parents=True, exist_ok=True)
        packed.write_text(version)
    made = folder / f"{name}-{version}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", tree, made], check=True, capture_output=True, timeout=60)
    return made


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("runs", [True, False])
def test_a_service_that_runs_never_has_another_versions_files(tmp_path: Path, runs: bool, refused: bool) -> None:
    """Its next worker, and all that it had not imported yet, were of the new version: its jobs failed."""
    need("dpkg-deb", "dpkg")
    need("unshare", "util-linux")
    need_root("a /run of the test's own")
    proof, tools = tmp_path / "proof", tmp_path / "tools"
    for folder in (proof, tools, *(tmp_path / "admin" / name for name in ("info", "updates", "triggers"))):
        folder.mkdir(parents=True)
    (tmp_path / "admin/status").touch()
    # None of it is done to this host.
    for name in ("getent", "usermod", "useradd", "groupadd", "chown", "chmod", "find", "aa-enabled"):
        (tools / name).symlink_to("/bin/true" if name != "aa-enabled" else "/bin/false")
    (tools / "systemctl").write_text(SYSTEMCTL)
    (tools / "systemctl").chmod(0o755)
    other = a_package(tmp_path, proof, "other", "1", "its own")
    packages = [
        a_package(tmp_path, proof, "synvirt", "1"),
        a_package(tmp_path, proof, "synvirt", "2", "its own" if refused else "x"),
    ]
    script = (
        "mount -t tmpfs tmpfs /run; mkdir -p /run/systemd/system; "
        f"dpkg --admindir={tmp_path}/admin --force-unsafe-io --install {other} {packages[0]} || exit 1; "
        + (f"touch {proof}/active; " if runs else "")
        + f"dpkg --admindir={tmp_path}/admin --force-unsafe-io --install {packages[1]}; ls /run"
    )
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PROOF": str(proof), "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=120, env=environ)
    assert (proof / "installed").read_text() == ("1" if refused else "2"), done.stdout + done.stderr
    said = (proof / "said").read_text().split("\n")[:-1] if (proof / "said").exists() else []
    assert said == (["stop 1", f"start {'1' if refused else '2'}"] if runs else []), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "systemd"
