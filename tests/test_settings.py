"""Flags over variables over the file over defaults; a wrong setting is named."""

import os
import tempfile
from pathlib import Path

import pytest

from synvirt.errors import BadRequest
from synvirt.sample.pieces import cache_dir
from synvirt.settings import DirectorySetting, Settings, load
from synvirt.settings.data_dir import check_data_dir, prepare_data_dir
from synvirt.settings.forms import listen_address
from synvirt.store import Store


def test_the_nearest_word_counts(tmp_path: Path) -> None:
    file = tmp_path / "synvirt.toml"
    file.write_text('listen = "127.0.0.1:1"\njobs_at_once = 2\nlog_level = "debug"\n[boot]\ntimeout_s = 7\n')
    environ = {"SYNVIRT_JOBS_AT_ONCE": "3", "SYNVIRT_LOG_LEVEL": "error", "OTHER": "x"}
    settings = load(config=file, environ=environ, flags={"log_level": "warning", "listen": None})
    assert (settings.listen, settings.boot_timeout_s) == ("127.0.0.1:1", 7)
    assert (settings.jobs_at_once, settings.log_level) == (3, "warning")
    assert settings.auth == "file"


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "synvirt.toml"
    file.write_text(f'data_dir = "{tmp_path}"')
    assert load(environ={"SYNVIRT_CONFIG": str(file)}).data_dir == tmp_path
    assert load(environ={"SYNVIRT_CONFIG": ""}).data_dir == load(environ={}).data_dir


def test_a_user_without_a_home_is_told_how_to_name_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user that no file names, without HOME: it was an unexpected RuntimeError."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 4242424)
    monkeypatch.setattr(os, "getuid", lambda: 4242424)
    for named, asked in {"SYNVIRT_DATA_DIR": lambda: load(environ={}), "XDG_CACHE_HOME": cache_dir}.items():
        with pytest.raises(BadRequest, match="no home") as refused:
            asked()
        assert named in (refused.value.hint or "")
    assert load(environ={"SYNVIRT_DATA_DIR": str(tmp_path)}).data_dir == tmp_path


@pytest.mark.parametrize(
    ("text", "named"),
    [("jobs_at_once = 0", "jobs_at_once"), ("no_such = 1", "no_such"), ("x = [", "synvirt.toml"), ('auth = "none"', "auth")],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "synvirt.toml"
    file.write_text(text)
    with pytest.raises(BadRequest, match=named):
        load(config=file, environ={})


@pytest.mark.parametrize("listen", ["8441", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ":8441", "nonsense", "[::1]", "a:٣"])
def test_an_address_that_cannot_be_is_refused_before_anything_is_made(tmp_path: Path, listen: str) -> None:
    with pytest.raises(BadRequest, match=r"setting listen \(--listen\): .* is not HOST:PORT"):
        load(environ={"SYNVIRT_DATA_DIR": str(tmp_path / "data")}, flags={"listen": listen})
    assert listen_address("[::1]:0") == ("::1", 0)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"none\.toml"):
        load(config=tmp_path / "none.toml", environ={})


def test_variables_that_are_no_settings_are_left_alone() -> None:
    environ = {
        "SYNVIRT_MIGRATOR_SKIP_GO_SHIM": "1",
        "SYNVIRT_PASSWORD": "secret",
        "SYNVIRT_LAB": "/srv/lab",
        "SYNVIRT_DATA_DIR": "/srv/synvirt",
    }
    assert load(environ=environ).data_dir == Path("/srv/synvirt")


def test_every_path_is_whole_wherever_a_process_of_the_service_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in its cage could not open `data/volumes/…` of a service that was started with --data-dir data."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "synvirt.toml"
    file.write_text(
        'virtio_win_iso = "w.iso"\nbackup_export_roots = ["out"]\n[destinations.more]\nkind = "directory"\npath = "more"\n'
    )
    found = load(config=file, environ={"SYNVIRT_DATA_DIR": "data"})
    assert (found.data_dir, found.virtio_win_iso) == (tmp_path / "data", tmp_path / "w.iso")
    assert found.backup_export_roots == (tmp_path / "out",)
    places = [one.path for one in found.destinations_by_name.values() if isinstance(one, DirectorySetting)]
    assert places == [tmp_path / "data" / "volumes", tmp_path / "more"]
    assert load(environ={}, flags={"data_dir": Path("flag")}).data_dir == tmp_path / "flag"


def test_the_folder_is_made_with_its_modes_and_repaired(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    prepare_data_dir(settings)
    settings.imports_dir.chmod(0o777)
    prepare_data_dir(settings)
    assert settings.imports_dir.stat().st_mode & 0o777 == 0o750
    assert settings.keyring_dir.stat().st_mode & 0o777 == 0o700


def test_what_a_start_left_half_made_in_the_keyring_goes_at_the_next(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    prepare_data_dir(settings)
    for name in (".tls.crt.0123456789abcdef", ".users.fedcba9876543210", ".a\nb.0123456789abcdef", "tls.key", ".mine"):
        (settings.keyring_dir / name).touch()
    prepare_data_dir(settings)
    assert {one.name for one in settings.keyring_dir.iterdir()} == {"tls.key", ".mine"}


def test_a_command_beside_a_service_does_not_close_the_volumes_to_its_guests(tmp_path: Path) -> None:
    """`synvirt password`, or a second `serve` that is refused: the service has opened them to QEMU's user."""
    settings = Settings(data_dir=tmp_path / "data")
    prepare_data_dir(settings)
    for folder in (settings.data_dir, settings.volumes_dir):
        folder.chmod(0o757)
    prepare_data_dir(settings)
    assert settings.data_dir.stat().st_mode & 0o001
    assert settings.volumes_dir.stat().st_mode & 0o777 == 0o751


@pytest.mark.parametrize("name", ["file", "file/inside", "x" * 300])
def test_a_folder_that_cannot_be_made_is_said_with_its_cause(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match=r"cannot be made ready: .*(exists|Not a directory|too long)") as reported:
        prepare_data_dir(Settings(data_dir=tmp_path / name))
    assert "--data-dir" in (reported.value.hint or "")


FOREIGN = ["imports", "keyring", "volumes", "receipts", "keyring/tls.key", "migrator.db", "synvirt.lock"]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_another_user_s_service_left_is_named_with_both_users(foreign: str) -> None:
    """As after `sudo synvirt serve`: the next start by the folder's own user said nothing but «Permission denied»."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    with tempfile.TemporaryDirectory() as name:
        settings = Settings(data_dir=Path(name) / "data")
        settings.data_dir.parent.chmod(0o755)
        prepare_data_dir(settings)
        settings.receipts_dir.mkdir()
        for made in ("keyring/tls.key", "migrator.db", "synvirt.lock"):
            (settings.data_dir / made).touch(0o600)
        for path in (settings.data_dir, *settings.data_dir.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        assert _prepared_by_nobody(settings) == ""
        os.chown(settings.data_dir / foreign, 0, 0)
        message = _prepared_by_nobody(settings)
        assert message.startswith(f"{settings.data_dir / foreign} belongs to root, and this runs as nobody")
        assert f"chown -R nobody {settings.data_dir}" in message
        prepare_data_dir(settings)


NOBODY = 65534


def _prepared_by_nobody(settings: Settings) -> str:
    """What a process of that user says; nothing, if all is right."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        message = ""
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            prepare_data_dir(settings)
        except BaseException as error:
            message = f"{error} {getattr(error, 'hint', '')}"
        os.write(writing, message.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        message = answer.read()
    os.waitpid(child, 0)
    return message


@pytest.mark.parametrize("name", ["/proc/x", "/sys/x/y", "/proc", "link/x"])
def test_the_kernels_own_file_systems_are_no_place_for_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to("/proc")
    with pytest.raises(BadRequest, match="the kernel's own file system"):
        check_data_dir(Settings(data_dir=tmp_path / name))


@pytest.mark.parametrize(("uri", "through"), [("", 0), ("qemu:///system", 0o001)])
def test_a_libvirtd_s_qemu_gets_through_to_its_volumes_and_lists_nothing(tmp_path: Path, uri: str, through: int) -> None:
    """As the service makes them, whose umask is narrow."""
    before = os.umask(0o027)
    try:
        settings = Settings(data_dir=tmp_path / "data", libvirt_uri=uri)
        prepare_data_dir(settings)
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (settings.data_dir, settings.volumes_dir, settings.keyring_dir)}
    assert modes == {
        settings.data_dir: 0o750 | through,
        settings.volumes_dir: 0o750 | through,
        settings.keyring_dir: 0o700,
    }


@pytest.mark.parametrize("umask", [0, 0o077])
def test_others_pass_through_the_folders_above_it_and_write_in_none(tmp_path: Path, umask: int) -> None:
    above = tmp_path / "srv"
    before = os.umask(umask)
    try:
        prepare_data_dir(Settings(data_dir=above / "synvirt" / "data"))
    finally:
        os.umask(before)
    assert {folder.stat().st_mode & 0o777 for folder in (above, above / "synvirt")} == {0o711}


def test_zfs_is_the_default_where_a_pool_is_set(tmp_path: Path) -> None:
    assert list(load(environ={}).destinations_by_name) == ["directory"]
    settings = load(environ={"SYNVIRT_ZFS_POOL": "tank"})
    assert list(settings.destinations_by_name) == ["zfs", "directory"]
    assert settings.destinations_by_name["zfs"].model_dump() == {"kind": "zfs", "pool": "tank", "namespace": "synvirt"}
    assert (
        next(iter(load(environ={"SYNVIRT_ZFS_POOL": "tank", "SYNVIRT_DESTINATION": "directory"}).destinations_by_name))
        == "directory"
    )


def test_the_file_may_name_more_destinations(tmp_path: Path) -> None:
    file = tmp_path / "synvirt.toml"
    file.write_text(
        f'destination = "archive"\n[destinations.archive]\nkind = "directory"\npath = "{tmp_path}"\n'
        '[destinations.fast]\nkind = "zfs"\npool = "nvme"\n'
    )
    found = load(config=file, environ={}).destinations_by_name
    assert list(found) == ["archive", "directory", "fast"]
    assert found["archive"].model_dump() == {"kind": "directory", "path": tmp_path, "mount_point": None}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('destination = "zfs"', "there is no destination zfs"),
        ('destination = "slow"', "there is no destination slow"),
        ('[destinations.Fast]\nkind = "zfs"\npool = "x"', "destinations_Fast"),
        ('[destinations.fast]\nkind = "ntfs"', "destinations_fast"),
        ('[destinations.fast]\nkind = "zfs"', r"setting destinations_fast_pool \("),
        ('[destinations.fast]\nkind = "directory"\npath = "/a"\nmount_point = "/b"', r"setting destinations_fast \("),
        ('[destinations."a b"]\nkind = "zfs"\npool = "x"', r"setting destinations_a b \("),
    ],
)
def test_a_destination_that_cannot_be_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "synvirt.toml"
    file.write_text(text)
    with pytest.raises(BadRequest, match=named):
        _ = load(config=file, environ={}).destinations_by_name


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ('[destinations.fast]\nkind = "directory"\npath = "/srv"\nmountpoint = "/"', "mount_point"),
        ('[destinations.fast]\nkind = "zfs"\npool = "x"\nnamspace = "y"', "namespace"),
        ('[backup_offers.office]\npath = "/srv"\nuser = "office"\nquota = 5', "quota_bytes"),
        ('[wave_commands.page]\nargv = ["page"]\ntimeout = 5', "timeout_s"),
        ('lissten = "127.0.0.1:8441"', "listen"),
    ],
)
def test_a_mistyped_name_is_answered_by_the_nearest_that_may_be_there(tmp_path: Path, text: str, near: str) -> None:
    file = tmp_path / "synvirt.toml"
    file.write_text(text)
    with pytest.raises(BadRequest, match="is not a known field") as refused:
        load(config=file, environ={})
    assert refused.value.hint == f"did you mean {near}?"


def test_hosts_of_one_database_have_names(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text('database_url = "postgresql://synvirt@db/synvirt"\n')
    with pytest.raises(BadRequest, match="setting host_id: is required"):
        load(config=config, environ={}).check_host_id()
    load(config=config, environ={"SYNVIRT_HOST_ID": "local"}).check_host_id()
    load(environ={"SYNVIRT_DATA_DIR": str(tmp_path)}).check_host_id()
    with pytest.raises(BadRequest, match="host_id"):
        load(environ={"SYNVIRT_HOST_ID": "kvm 1"})


@pytest.mark.parametrize("name", ["what?", "a?b=c", "100%41", "50%", "ü %zz", "#&;:@=+,'\"$*[]!\\"])
def test_the_store_lies_in_the_service_s_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    """SQLAlchemy takes a URL: a question mark began its parameters, and the store was made in another folder."""
    folder = tmp_path / name
    folder.mkdir()
    Store(Settings(data_dir=folder).store_url).close()
    assert (folder / "migrator.db").is_file()
    assert [one.name for one in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("TRUSTED_PROXIES", "10.0.0.0/8, proxy.example", "'proxy.example' is neither an address nor a network"),
        ("TRUSTED_PROXIES", "10.0.0.0/33", "neither an address nor a network"),
        ("REMOTE_ALLOWED_HOSTS", "https://nas.example", "'https://nas.example' is neither a host's name nor a network"),
        ("REMOTE_ALLOWED_HOSTS", "nas.example:443", "neither a host's name"),
        ("SOURCE_ALLOWED_HOSTS", "*", "neither a host's name"),
        ("SOURCE_ALLOWED_HOSTS", "kvm*.example", "neither a host's name"),
        ("BASE_URL", "https://kvm.example/synvirt", "must be a path"),
        ("BASE_URL", "/a b", "must be a path"),
        ("BASE_URL", "/a/../b", "must be a path"),
        ("BASE_URL", "/a//b", "must be a path"),
        ("BASE_URL", "/{x}", "must be a path"),
        ("DATABASE_URL", "mysql://synvirt:hunter2@db/synvirt", "must be postgresql://"),
        ("DATABASE_URL", "postgres://synvirt:hunter2@db/synvirt", "must be postgresql://"),
        ("DATABASE_URL", "postgresql://synvirt:hunter2@db:port/synvirt", "its port is none"),
        ("DATABASE_URL", "/var/lib/hunter2.db", "must be postgresql://"),
        ("VMCX_TOOL_ARGUMENTS", "-i {driver} {source}", "it lacks {folder}"),
        ("VMCX_TOOL_ARGUMENTS", "'{source} {folder}", "No closing quotation"),
        ("DATABASE_URL", "sqlite://", "must be postgresql://"),
        # An import by the tool would fail as an error of our own.
        ("VMCX_TOOL_TIMEOUT_S", "inf", "less than or equal to 1209600"),
        ("BOOT_TIMEOUT_S", "inf", "less than or equal to 1209600"),
        ("COPY_STALLED_S", "2000000", "less than or equal to 1209600"),
    ],
)
def test_a_value_that_no_service_can_use_is_refused_when_it_is_read(variable: str, value: str, named: str) -> None:
    with pytest.raises(BadRequest) as caught:
        load(environ={f"SYNVIRT_{variable}": value})
    assert f"setting {variable.lower()} (environment SYNVIRT_{variable})" in caught.value.detail
    assert named in caught.value.detail
    assert "hunter2" not in str(caught.value)


def test_values_of_these_forms_are_taken() -> None:
    found = load(
        environ={
            "SYNVIRT_TRUSTED_PROXIES": "127.0.0.1,10.0.0.5/8 ::1",
            "SYNVIRT_REMOTE_ALLOWED_HOSTS": "nas,*.example,*.s3.eu.example.com,10.20.0.0/16,fe80::/10,bücher.example,my_host",
            "SYNVIRT_BASE_URL": "/a/kvm-host_1.x~/",
            "SYNVIRT_DATABASE_URL": "postgresql:///synvirt?host=/run/postgresql",
        }
    )
    assert (len(found.trusted_proxies), len(found.remote_allowed_hosts)) == (3, 7)
    for url in ("sqlite:////srv/store.db", "postgresql+psycopg://u:p@db:5432/x"):
        assert load(environ={"SYNVIRT_DATABASE_URL": url}).store_url == url


@pytest.mark.parametrize("kind", ["folder", "link"])
@pytest.mark.parametrize("name", ["synvirt.lock", "migrator.db", "migrator.db.lock", "keyring/tls.key", "keyring/users"])
def test_a_folder_where_the_service_keeps_a_file_is_named(tmp_path: Path, name: str, kind: str) -> None:
    settings = Settings(data_dir=tmp_path)
    prepare_data_dir(settings)
    at = tmp_path / name
    if kind == "folder":
        at.mkdir()
    else:
        at.symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        BadRequest, match=f"{name} is a {'folder' if kind == 'folder' else 'symbolic link to nothing'}, and"
    ) as caught:
        prepare_data_dir(settings)
    assert caught.value.hint == "move it elsewhere"
