"""Who guests run as: the user of this host who reaches what they need, or the service; and what is opened to that user."""

import errno
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.kvm import acl, qemu_user
from synvirt.settings import DirectorySetting, RbdSetting, Settings
from tests.needs import need_root


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that any user gets through to, unlike pytest's own."""
    need_root("choosing another user for guests")
    with tempfile.TemporaryDirectory(prefix="synvirt-user-") as made:
        Path(made).chmod(0o711)
        yield Path(made)


def user_of(settings: Settings) -> str:
    found = qemu_user.choose(settings)
    assert found.lacking == (found.user is None)
    return found.user.name if found.user else found.why


def test_the_hosts_own_user_is_taken(folder: Path) -> None:
    assert user_of(Settings(data_dir=folder)) == "libvirt-qemu"
    assert user_of(Settings(data_dir=folder / "not made yet")) == "libvirt-qemu"


def test_a_folder_that_is_shut_to_it_leaves_guests_roots(folder: Path) -> None:
    folder.chmod(0o700)
    assert user_of(Settings(data_dir=folder / "data")) == f"they run as root: libvirt-qemu cannot reach {folder}"


def test_a_destination_elsewhere_counts_too(folder: Path) -> None:
    fast = folder / "fast"
    fast.mkdir(mode=0o700)
    settings = Settings(data_dir=folder / "data", destinations={"fast": DirectorySetting(kind="directory", path=fast)})
    assert user_of(settings) == f"they run as root: libvirt-qemu cannot reach {fast}"
    fast.chmod(0o711)
    assert user_of(settings) == "libvirt-qemu"


def test_a_destination_whose_mount_has_lost_its_server_counts_for_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at it raises, and the service did not start."""
    fast, really = folder / "fast", os.stat

    def stale(path: Any, *given: Any, **named: Any) -> os.stat_result:
        if path == fast:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return really(path, *given, **named)

    monkeypatch.setattr(os, "stat", stale)
    settings = Settings(data_dir=folder / "data", destinations={"fast": DirectorySetting(kind="directory", path=fast)})
    assert user_of(settings) == "libvirt-qemu"


def test_what_the_service_makes_for_volumes_is_open_to_it(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        qemu_user.make(folder / "srv/volumes")
    finally:
        os.umask(before)
    settings = Settings(data_dir=folder / "data")
    named = DirectorySetting(kind="directory", path=folder / "srv/volumes")
    assert user_of(settings.model_copy(update={"destinations": {"elsewhere": named}})) == "libvirt-qemu"
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in ("srv", "srv/volumes")} == {0o751}


def test_the_key_of_cephs_admin_has_to_be_readable(folder: Path) -> None:
    """QEMU finds it by itself; another client's comes by libvirt."""
    conf, key = folder / "ceph.conf", folder / "ceph.client.admin.keyring"
    conf.write_text(f"[global]\nkeyring = {folder}/$cluster.$name.keyring\n")
    key.write_text("[client.admin]")
    key.chmod(0o600)

    def settings(client: str) -> Settings:
        pool = RbdSetting(kind="rbd", pool="p", client=client, conf=conf)
        return Settings(data_dir=folder / "data", destinations={"ceph": pool})

    assert user_of(settings("admin")) == f"they run as root: libvirt-qemu cannot reach {key}"
    assert user_of(settings("synvirt")) == "libvirt-qemu"
    key.chmod(0o644)
    assert user_of(settings("admin")) == "libvirt-qemu"


@pytest.mark.parametrize(
    ("setting", "uri", "why"),
    [
        ("root", "", "they run as root: the setting qemu_user says so"),
        ("no-such-user", "", "they run as root: this host has no user no-such-user"),
    ],
)
def test_the_setting_says_who(folder: Path, setting: str, uri: str, why: str) -> None:
    assert user_of(Settings(data_dir=folder, qemu_user=setting, libvirt_uri=uri)) == why


def test_a_user_that_is_named_is_taken_and_what_it_lacks_is_said(folder: Path) -> None:
    folder.chmod(0o700)
    found = qemu_user.choose(Settings(data_dir=folder / "data", qemu_user="nobody"))
    assert found.user is not None
    assert (found.user.name, found.lacking) == ("nobody", True)
    assert found.why == f"they run as nobody, which cannot reach {folder}"


def test_a_libvirtd_has_its_own_and_a_service_that_is_not_root_stays_what_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert qemu_user.choose(Settings(data_dir=folder, libvirt_uri="qemu:///system")).user is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = qemu_user.choose(Settings(data_dir=folder))
    assert (found.user, found.lacking) == (None, False)


def test_opened_to_others_the_data_folder_hides_what_is_in_it(folder: Path) -> None:
    data_dir = folder / "data"
    (data_dir / "volumes").mkdir(parents=True)
    data_dir.chmod(0o750)
    (data_dir / "volumes").chmod(0o750)
    store = data_dir / "migrator.db"
    store.write_bytes(b"of a version that left it to the folder")
    store.chmod(0o644)
    assert qemu_user.decide(Settings(data_dir=data_dir)).user is not None
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (data_dir, data_dir / "volumes", store)}
    assert modes == {"data": 0o751, "volumes": 0o751, "migrator.db": 0o640}


def test_one_user_more_may_open_a_device(folder: Path) -> None:
    device = folder / "device"
    device.touch()
    device.chmod(0o640)
    found = next(qemu_user._accounts(("libvirt-qemu",)))
    assert found.cannot_reach([f"w:{device}"]) == str(device)
    for _ in range(2):  # an entry that is there is no second
        acl.let(device, found.uid)
        assert found.cannot_reach([f"w:{device}"]) is None
    nobody = next(qemu_user._accounts(("nobody",)))
    assert nobody.cannot_reach([f"r:{device}"]) == str(device)


def test_what_is_handed_over_is_no_group_of_peoples() -> None:
    """Debian's libvirt-qemu is in the group kvm, which all users of KVM are in, too."""
    need_root("the users of guests")
    found = next(qemu_user._accounts(("libvirt-qemu",)))
    assert found.group == "libvirt-qemu"
    assert found.gid != pwd.getpwnam("libvirt-qemu").pw_gid
