"""The doctor finds what is here, says what is not, and judges only what the settings ask for."""

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from synvirt.accounts import Role, set_password
from synvirt.cli import app
from synvirt.disks import nfs
from synvirt.doctor import CHECKS, Check, Finding, Missing, examine, needs_met
from synvirt.errors import Internal
from synvirt.fleet.model import WaveRequest
from synvirt.fleet.waves import Waves
from synvirt.keyring import migrator_key, seal
from synvirt.migrations.memory import JobMemory
from synvirt.migrations.secrets import belongs_to
from synvirt.model.kinds import LiveKind
from synvirt.model.rehearsal import Rehearsal, RehearsalRequest, RehearsalState
from synvirt.model.sources import Source
from synvirt.model.values import now
from synvirt.settings import DirectorySetting, RbdSetting, Settings, ZfsSetting
from synvirt.settings.data_dir import prepare_data_dir
from synvirt.sizes import sized
from synvirt.store import Store
from synvirt.store.opening import POSTGRESQL_LIMITS
from synvirt.store.tables import backups, ledger, memory, migrations, rehearsals, wave_members, waves
from synvirt.store.wave_hooks import SealedHook
from synvirt.store.waves import NewWave
from tests.house import live_plan
from tests.jobs.migrations import migration
from tests.needs import need

ROOT = Path(__file__).parent.parent
# Specification part 1, "Host requirements on the installed appliance".
SPECIFIED = {"zfs", "blkdiscard", "virt-v2v-in-place", "virt-v2v hyperv", "qemu-img", "virtio-win.iso"}
# And its "Host paths".
SPECIFIED |= {"import root", "migrator.key", "store"}


@pytest.fixture(autouse=True)
def _no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the accelerator takes seconds, and has tests of its own."""
    monkeypatch.setattr("synvirt.hypervisor.accel.KVM_DEVICE", Path("/nonexistent/kvm"))
    monkeypatch.setattr("synvirt.hypervisor.accel._known", None)


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def finding(name: str, settings: Settings) -> Finding:
    """Of this check alone: all of them start a dozen programs."""
    with pytest.MonkeyPatch.context() as alone:
        alone.setattr("synvirt.doctor.CHECKS", [check for check in CHECKS if check.name == name])
        (found,) = examine(settings)
    return found


def test_every_requirement_of_the_specification_has_a_row() -> None:
    assert {check.name for check in CHECKS} >= SPECIFIED
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize(("free", "found"), [(0, False), (15 << 20, False), (16 << 20, True)])
def test_a_data_folder_without_space_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, *, found: bool
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    seen = finding("data_dir", Settings(data_dir=tmp_path))
    assert (seen.found, "is full" in seen.detail) == (found, not found)
    assert sized(free) in seen.detail


def test_a_ceph_pool_that_cannot_be_reached_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("rbd", reason="needs librbd for Debian's Python: apt-get install python3-rbd")
    pool = RbdSetting(kind="rbd", pool="vms", conf=tmp_path / "ceph.conf")
    settings = Settings(data_dir=tmp_path, destinations={"ceph": pool})
    found = finding("ceph pool", settings)
    assert (found.found, found.needed) == (False, True)
    assert "cannot be reached" in found.detail
    assert not finding("ceph pool", Settings(data_dir=tmp_path)).needed


def test_what_reads_disks_of_nutanix_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host that has it and on one that has not; neither is needed by what the settings ask for."""
    settings = Settings(data_dir=tmp_path)
    assert finding("libnfs", settings).detail in nfs.LIBRARIES
    assert finding("qemu iscsi", settings).detail.endswith("/qemu/block-iscsi.so")
    monkeypatch.setattr(nfs, "LIBRARIES", ("libnfs.so.0",))
    found = finding("libnfs", settings)
    assert (found.found, found.needed, found.detail) == (False, False, "libnfs is not installed on this host")
    assert found.how_to_get == "apt-get install libnfs13"


def test_what_installs_the_agent_of_a_windows_guest_is_looked_for(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, virt_tools_dir=tmp_path)
    assert not finding("rhsrvany", settings).found
    (tmp_path / "rhsrvany.exe").touch()
    assert finding("rhsrvany", settings).detail == str(tmp_path / "rhsrvany.exe")


# What this service and its commands start by name, on a host of their own.
STARTED = (
    *("qemu-system-x86_64", "qemu-img", "qemu-nbd", "nbdkit", "swtpm", "swtpm_setup", "virt-v2v-in-place", "virt-v2v"),
    *(
        "ssh",
        "ssh-keyscan",
        "setpriv",
        "systemd-creds",
        "zfs",
        "blkdiscard",
        "syslinux",
        "mformat",
        "mcopy",
        "mke2fs",
        "openssl",
    ),
)


def test_each_of_debians_packages_is_named_by_a_row() -> None:
    """All that the service needs of Debian, but what Python and TLS need themselves."""
    wanted = re.findall(r"^([\w.+-]+)", (ROOT / "packaging" / "packages.txt").read_text(), re.MULTILINE)
    named = {word for check in CHECKS for word in re.findall(r"[\w.+-]+", check.how_to_get)}
    assert set(wanted) - named == {"python3-venv", "ca-certificates"}


@pytest.mark.parametrize("name", STARTED)
def test_a_program_that_is_not_installed_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where one is missing, the error says that the doctor names the package."""
    monkeypatch.setattr("synvirt.doctor.finding.find", lambda wanted: None if wanted == name else f"/usr/bin/{wanted}")
    monkeypatch.setattr("synvirt.doctor.finding.first_line", lambda argv: "1.0")
    rows = [one for one in CHECKS if one.name not in ("libvirt", "guests' user", "domains' files")]
    monkeypatch.setattr("synvirt.doctor.CHECKS", rows)
    named = [one for one in examine(Settings(data_dir=tmp_path)) if one.detail == f"no program {name}"]
    assert [one.found for one in named] == [False] * len(named)
    assert any("install" in one.how_to_get or "virt-v2v" in one.how_to_get or "plugin" in one.how_to_get for one in named)


def test_each_row_says_what_it_is_for_and_how_to_get_it(tmp_path: Path) -> None:
    for one in examine(Settings(data_dir=tmp_path)):
        assert one.detail, one
        assert one.what_for, one
        assert one.how_to_get, one


def test_a_row_that_breaks_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: Settings) -> str:
        raise Internal("its version cannot be read")

    def lacks(_: Settings) -> str:
        raise Missing("it is not here")

    def too_long(_: Settings) -> str:
        return str(Path("/" + 300 * "a").exists())

    rows = (("a", breaks), ("b", lacks), ("c", too_long), ("d", lambda _: "1.0"))
    monkeypatch.setattr("synvirt.doctor.CHECKS", tuple(Check(name, "x", "y", look) for name, look in rows))
    found = [(one.name, one.found, one.detail) for one in examine(Settings(data_dir=tmp_path))]
    assert found == [
        ("a", False, "its version cannot be read"),
        ("b", False, "it is not here"),
        ("c", False, "it could not be checked: File name too long"),
        ("d", True, "1.0"),
    ]


def test_what_no_setting_asks_for_may_be_missing() -> None:
    def row(*, found: bool, needed: bool) -> Finding:
        return Finding("x", found, needed, "", "", "")

    assert needs_met([row(found=True, needed=True), row(found=False, needed=False)])
    assert not needs_met([row(found=True, needed=True), row(found=False, needed=True)])


def test_zfs_is_needed_once_a_pool_is_set(tmp_path: Path) -> None:
    assert not finding("zfs", Settings(data_dir=tmp_path)).needed
    named = {"fast": ZfsSetting(kind="zfs", pool="nvme")}
    for settings in (
        Settings(data_dir=tmp_path, zfs_pool="tank"),
        Settings(data_dir=tmp_path, destination="zfs"),
        Settings(data_dir=tmp_path, destinations=named),
    ):
        assert finding("zfs", settings).needed
        assert finding("zfs pool", settings).needed
        assert finding("blkdiscard", settings).needed


@pytest.mark.parametrize(("drivers", "found"), [("input:disk\ninput:hyperv", True), ("input:disk\ninput:ova", False)])
def test_a_conversion_tool_without_the_hyperv_driver_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivers: str, *, found: bool
) -> None:
    program(tmp_path, "virt-v2v", f"printf '{drivers}\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert finding("virt-v2v hyperv", Settings(data_dir=tmp_path)).found is found


def test_what_the_services_user_may_not_do_on_zfs_is_said_as_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = "canmount,clone,compression,create,destroy,mount,snapshot,userprop"
    program(tmp_path, "zfs", f"printf 'Local+Descendent permissions:\\n\\tuser synvirt {allowed}\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    settings = Settings(data_dir=tmp_path, zfs_pool="tank")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("synvirt.destinations.zfs_allow.caller", lambda: ("synvirt", frozenset({"kvm"})))
    monkeypatch.setattr("synvirt.doctor.volumes.may_open_others_files", lambda: False)
    one = finding("zfs allow", settings)
    assert (one.found, one.needed) == (False, True)
    assert one.detail == "root has to call `zfs allow -u synvirt volmode tank/synvirt` and `usermod -aG disk synvirt`"
    monkeypatch.setattr("synvirt.destinations.zfs_allow.caller", lambda: ("synvirt", frozenset({"disk"})))
    program(tmp_path, "zfs", f"printf 'Local+Descendent permissions:\\n\\tuser synvirt {allowed},volmode\\n'")
    assert finding("zfs allow", settings).found


def test_a_zfs_whose_module_is_not_loaded_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "zfs", "echo 'The ZFS modules are not loaded.' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    one = finding("zfs", Settings(data_dir=tmp_path))
    assert not one.found
    assert "modules are not loaded" in one.detail


@pytest.mark.parametrize(("health", "found"), [("ONLINE", True), ("DEGRADED", True), ("SUSPENDED", False), ("FAULTED", False)])
def test_a_pool_that_takes_no_writes_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, health: str, *, found: bool
) -> None:
    """It has lost its disks, and still lists its datasets and its free space."""
    program(tmp_path, "zfs", "exit 0")
    program(tmp_path, "zpool", f"printf '{health}\\t1.82T\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    one = finding("zfs pool", Settings(data_dir=tmp_path, zfs_pool="tank"))
    assert one.found is found
    assert one.detail.startswith(f"tank: {health} free 1.82T")
    assert ("zpool clear" in one.detail) is not found


def test_the_driver_image_is_looked_for_where_the_setting_says(tmp_path: Path) -> None:
    iso = tmp_path / "drivers.iso"
    settings = Settings(data_dir=tmp_path, virtio_win_iso=iso)
    assert not finding("virtio-win.iso", settings).found
    iso.touch()
    assert finding("virtio-win.iso", settings).found


def test_a_data_dir_that_is_not_made_yet_is_judged_by_the_folder_above(tmp_path: Path) -> None:
    assert finding("data_dir", Settings(data_dir=tmp_path / "not" / "yet")).found
    assert not finding("data_dir", Settings(data_dir=Path("/proc/not/yet"))).found
    assert list(tmp_path.iterdir()) == [], "looking must not change anything"


def test_the_command_answers_json_and_exits_by_what_is_needed(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["doctor", "--json", "--data-dir", str(tmp_path)])
    body = json.loads(answer.stdout)
    assert [check["name"] for check in body["checks"]] == [check.name for check in CHECKS]
    assert body["ok"] is (answer.exit_code == 0)
    broken = CliRunner().invoke(app, ["doctor", "--data-dir", "/proc/not/yet"])
    assert broken.exit_code == 1
    assert "MISSING  data_dir" in broken.stdout


def test_the_paths_of_the_specification_are_made_at_the_first_start_and_kept_to_their_modes(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    for name in ("import root", "migrator.key", "store"):
        assert "first start" in finding(name, settings).detail
    prepare_data_dir(settings)
    migrator_key(settings.keyring_dir / "migrator.key")
    Store(settings.store_url).close()
    assert all(finding(name, settings).found for name in ("import root", "migrator.key", "store"))
    settings.imports_dir.chmod(0o757)
    assert "0757, which is wider than 0750" in finding("import root", settings).detail
    (settings.keyring_dir / "migrator.key").chmod(0o640)
    assert not finding("migrator.key", settings).found


def test_a_key_of_another_length_is_no_key(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    prepare_data_dir(settings)
    path = settings.keyring_dir / "migrator.key"
    path.write_bytes(b"short")
    path.chmod(0o600)
    assert "5 bytes" in finding("migrator.key", settings).detail


@pytest.mark.parametrize("url", ["", "postgresql://nobody@127.0.0.1:1/none", "postgresql://nobody@127.0.0.1:{silent}/none"])
def test_a_store_that_cannot_be_opened_is_reported(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "migrator.db").write_bytes(b"this is no database, and long enough to be looked at " * 100)
    monkeypatch.setitem(POSTGRESQL_LIMITS, "connect_timeout", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = finding("store", Settings(data_dir=tmp_path, database_url=url.format(silent=silent.getsockname()[1])))
    assert not one.found
    assert "cannot be opened" in one.detail


def test_sources_that_this_host_s_key_does_not_open_are_named(tmp_path: Path) -> None:
    """A host that joins a fleet makes a key of its own, as long as nobody copies the fleet's."""
    settings = Settings(data_dir=tmp_path)
    prepare_data_dir(settings)
    assert finding("credentials", settings).detail == "no source is registered"
    ours = migrator_key(settings.keyring_dir / "migrator.key")
    store = Store(settings.store_url)
    assert finding("credentials", settings).detail == "no source is registered"
    for name, key in (("near", ours), ("lab", bytes(32))):
        source = Source(id=uuid4(), name=name, kind=LiveKind.VIM_API, endpoint="https://x", created_at=now())
        store.sources.add(source, seal(key, b"{}", belongs_to=belongs_to("source", source.id)), host="other")
        found = finding("credentials", settings)
        assert (found.found, found.detail.split()[-1]) == ((True, "source") if key == ours else (False, "lab"))
    store.close()


def test_all_that_another_key_has_sealed_is_named_and_not_only_sources(tmp_path: Path) -> None:
    """Of a job that reads a remote file, and of a wave's webhook; not what only another host opens."""
    settings = Settings(data_dir=tmp_path, host_id="here")
    prepare_data_dir(settings)
    ours, theirs = migrator_key(settings.keyring_dir / "migrator.key"), bytes(32)
    store = Store(settings.store_url)
    for host, key in (("here", ours), ("there", theirs)):
        store.add(job := migration(), host=host, sealed=seal(key, b"{}", belongs_to=belongs_to("job", job.id)))
    assert finding("credentials", settings).detail == "the key opens those of 1 job"
    hook, wave = uuid4(), uuid4()
    document = Source(id=wave, name="night", kind=LiveKind.VIM_API, endpoint="https://x", created_at=now())
    sealed = SealedHook(hook, "there", seal(theirs, b"[]", belongs_to=belongs_to("hook", hook)))
    store.waves.add_all([NewWave(wave, "night", "draft", document, [], "{}", [sealed])])
    store.add(job := migration(), host="here", sealed=seal(theirs, b"{}", belongs_to=belongs_to("job", job.id)))
    found = finding("credentials", settings)
    assert not found.found
    assert found.detail == f"the key of this host does not open the credentials of job {job.id}, webhook of wave night"
    store.close()


def test_stored_documents_that_cannot_be_read_are_shown(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    store = Store(settings.store_url)
    store.add(job := migration(), host="h")
    store.backups.put("point", point := uuid4(), job, host="h")
    store.memory.change(job.id, JobMemory, lambda before: before)
    store.record(job.id, "volume", "v")
    plan = {"id": "web", "vm": "web", "plan": live_plan().model_dump(mode="json")}
    wave = Waves(store.waves).create(WaveRequest.model_validate({"name": "night", "members": [plan]}))
    store.rehearsals.add(
        [
            rehearsal := Rehearsal(
                id=uuid4(),
                migration_id=job.id,
                state=RehearsalState.BOOTING,
                asked=RehearsalRequest(),
                submitted_by=None,
                created_at=now(),
            )
        ]
    )
    assert "stored documents" not in finding("store", settings).detail
    with store._writing() as db:
        for table in (memory, ledger, waves):
            db.execute(table.update().values(version="2.0"))
        for table in (wave_members, rehearsals):
            db.execute(table.update().values(document="{"))
        db.execute(migrations.update().values(document='{"id": 3}'))
        db.execute(backups.update().values(version="2.0"))
    store.close()
    one = finding("store", settings)
    assert not one.found
    assert f"migration {job.id}: a stored Migration cannot be read" in one.detail
    assert f"point {point}: a stored point is of version 2.0" in one.detail
    assert f"memory {job.id}: a stored memory is of version 2.0" in one.detail
    assert "ledger 1: a stored ledger is of version 2.0" in one.detail
    assert f"wave {wave.id}: a stored wave is of version 2.0" in one.detail
    assert f"wave member {wave.id} web: a stored Member is not JSON" in one.detail
    assert f"rehearsal {rehearsal.id}: a stored Rehearsal is not JSON" in one.detail


@pytest.mark.parametrize("name", ["what?", "50%20off", "a#1", "a b"])
def test_the_store_of_a_folder_with_any_name_is_read(tmp_path: Path, name: str) -> None:
    """SQLite takes a name for a URL here: a part of it would be another file's name, which is made, and is a good store."""
    settings = Settings(data_dir=tmp_path / name)
    prepare_data_dir(settings)
    Store(settings.store_url, on_commit=lambda: None).close()
    assert finding("store", settings).found
    assert [one.name for one in tmp_path.iterdir()] == [name]
    (settings.data_dir / "migrator.db").write_bytes(b"no store" * 1000)
    assert not finding("store", settings).found


def test_looking_at_a_store_changes_nothing_and_needs_no_rest(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    store = Store(settings.store_url)
    assert finding("store", settings).found, "a service has it open"
    store.close()


DOMAIN = """<domain type='kvm'><name>{name}</name>
  <metadata>{mark}</metadata>
  <os><nvram>{was}/libvirt/lib/qemu/nvram/{name}.fd</nvram></os>
  <devices>
    <disk type='file'><source file='{was}/volumes/4711/{name}.raw'/></disk>
    <serial type='pty'><log file='{was}/libvirt/serial/{name}.log'/></serial>
    <channel type='unix'><source mode='bind' path='/run/somewhere/{name}.agent'/></channel>
  </devices></domain>"""
OURS = "<s:job xmlns:s='https://synvirt.org/xmlns/job/1' id='1'/>"


def domain(settings: Settings, name: str, was: Path, mark: str = OURS, *, has_volume: bool = True) -> None:
    """A definition of the embedded driver, whose files were in the folder `was`, and are in the data folder now."""
    definitions = settings.data_dir / "libvirt/etc/qemu"
    definitions.mkdir(parents=True, exist_ok=True)
    (definitions / f"{name}.xml").write_text(DOMAIN.format(name=name, was=was, mark=mark))
    volume = settings.data_dir / f"volumes/4711/{name}.raw"
    volume.parent.mkdir(parents=True, exist_ok=True)
    if has_volume:
        volume.write_bytes(b"disk")


def test_domains_that_name_files_of_a_moved_data_folder_are_named(tmp_path: Path) -> None:
    settings, was = Settings(data_dir=tmp_path / "new/data"), tmp_path / "old"
    domain(settings, "here", settings.data_dir)
    assert finding("domains' files", settings).detail == "the files of 1 domain of ours"
    # Of others' domains nothing is said, nor of a disk that was removed and is nowhere.
    domain(settings, "foreign", was, mark="")
    domain(settings, "lost", was, has_volume=False)
    found = finding("domains' files", settings)
    assert (found.found, found.detail) == (True, "the files of 2 domains of ours")
    domain(settings, "db", was)
    domain(settings, "web", was)
    found = finding("domains' files", settings)
    assert (found.found, found.needed) == (False, True)
    assert found.detail == f"the domains db, web name files in {was}, which is {settings.data_dir} now"
    assert found.how_to_get == "docs/operating.md#move-the-data-folder"


def test_domains_that_name_files_of_a_moved_destination_are_named(tmp_path: Path) -> None:
    there = tmp_path / "srv/new"
    settings = Settings(data_dir=tmp_path / "data", destinations={"fast": DirectorySetting(kind="directory", path=there)})
    domain(settings, "web", tmp_path / "old", has_volume=False)
    (there / "4711").mkdir(parents=True)
    (there / "4711/web.raw").write_bytes(b"disk")
    assert (
        finding("domains' files", settings).detail
        == f"the domain web names files in {tmp_path}/old/volumes, which is {there} now"
    )


def test_a_folder_whose_file_system_is_not_mounted_is_named(tmp_path: Path) -> None:
    folder = DirectorySetting(kind="directory", path=tmp_path / "srv/volumes", mount_point=tmp_path / "srv")
    found = finding("mount points", Settings(data_dir=tmp_path, destinations={"fast": folder}))
    assert (found.found, found.needed, found.detail) == (False, True, f"nothing is mounted at {tmp_path}/srv")
    folder = DirectorySetting(kind="directory", path=Path("/proc/volumes"), mount_point=Path("/proc"))
    found = finding("mount points", Settings(data_dir=tmp_path, destinations={"fast": folder}))
    assert (found.found, found.detail) == (True, "/proc")
    assert not finding("mount points", Settings(data_dir=tmp_path)).needed


def test_a_users_file_without_an_account_is_said(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert finding("users file", settings).detail.endswith("made at the first start")
    prepare_data_dir(settings)
    users = settings.keyring_dir / "users"
    users.write_text("# nobody\n")
    found = finding("users file", settings)
    assert (found.found, found.needed, "nobody can log in" in found.detail) == (False, True, True)
    set_password(users, "admin", "of no use", Role.ADMIN)
    assert finding("users file", settings).detail == f"{users}: 1 account"
    users.write_text("nonsense\n")
    assert "is damaged" in finding("users file", settings).detail


def test_authorities_that_cannot_be_used_are_said(tmp_path: Path) -> None:
    assert not finding("remote_ca_file", Settings(data_dir=tmp_path)).needed
    found = finding("remote_ca_file", Settings(data_dir=tmp_path, remote_ca_file=tmp_path / "none.pem"))
    assert (found.found, found.needed, "none.pem cannot be used" in found.detail) == (False, True, True)


def test_a_host_that_gives_rehearsals_no_network_is_said(tmp_path: Path) -> None:
    """Before, a device that opens was enough, and rehearsals had no network all the same."""
    script = """
import sys
from pathlib import Path
from synvirt.doctor.guests import rehearsed_network
from synvirt.settings import Settings
try:
    print(rehearsed_network(Settings(data_dir=Path(sys.argv[1]))))
except Exception as error:
    print(type(error).__name__, error)
"""
    python = [sys.executable, "-P", "-c", script, str(tmp_path)]
    # A limit of this namespace alone, as an operator sets it for the host.
    limited = ["sh", "-c", 'echo 0 >/proc/sys/user/max_net_namespaces && exec "$@"', "sh", *python]
    namespace = [need("unshare", "util-linux"), "--user", "--map-root-user"]
    said = subprocess.run([*namespace, *limited], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("Missing this host gives a rehearsed guest no network"), said
    assert "user.max_net_namespaces" in said
