"""How SMB shares are protection to, and folders on them that are made for us and go again."""

from collections.abc import Iterator

import pytest

from synvirt.errors import AuthFailed, DiskReadFailed, MalformedArchive, NotFound, SourceUnreachable
from synvirt.remote import Interrupted, Remote, retrying, smb, smb_shares
from synvirt.remote.smb import SmbPlace
from tests.running.ports import free_port
from tests.servers.remote_servers import PASSWORD, Samba, remote, samba, wire

ENDINGS = frozenset({".vhdx", ".avhdx"})
LOGIN = (("username", "root"), ("password", PASSWORD))
GUARDED = {
    "plain": ("", "SMB 3.1.1, signed"),
    "encrypted": (" server smb encrypt = required\n", "SMB 3.1.1, encrypted by AES-128-GCM"),
    "old": (" server max protocol = SMB3_00\n server smb encrypt = required\n", "SMB 3.0, encrypted by AES-128-CCM"),
}


@pytest.fixture(scope="module", params=GUARDED)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def share(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Samba]:
    with samba(tmp_path_factory.mktemp("samba"), more=GUARDED[kind][0]) as running:
        yield running


def there(share: Samba) -> Remote:
    return remote(share.url, credentials=LOGIN)


@pytest.mark.parametrize("before", ["login", "file"])
def test_a_server_that_falls_silent_is_given_up(share: Samba, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """A domain controller that it asks is away; or its disks hang, and its connection stays."""
    (share.folder / "there.vhdx").write_bytes(b"x")
    monkeypatch.setattr(smb, "SILENCE_S", 1)
    monkeypatch.setattr(smb, "LOGIN_TIMEOUT_S", 1.0)
    with wire(share.port) as between:
        place = SmbPlace(remote(f"smb://127.0.0.1:{between.port}/disks/", credentials=LOGIN))
        if before == "login":
            between.on_bytes = lambda _: between.open.clear()  # all but its first answer
        else:
            place.tree()
            between.open.clear()
        with pytest.raises(Interrupted):
            place.open("there.vhdx")
        between.on_bytes = lambda _: None
        between.open.set()
        assert place.open("there.vhdx").size == 1
        place.close()


def test_how_it_is_spoken_to(share: Samba, kind: str) -> None:
    assert smb_shares.protection(there(share)) == GUARDED[kind][1]


def test_a_folder_is_made_listed_and_removed(share: Samba) -> None:
    place = there(share)
    for _ in range(2):
        smb_shares.make_folder(place, "Exports ü\u3000/one/whole")
    inside = share.folder / "Exports ü\u3000" / "one" / "whole"
    (inside / "Virtual Hard Disks").mkdir()
    for name in ("b.vhdx", "a.avhdx"):
        (inside / "Virtual Hard Disks" / name).write_bytes(b"x")
    (share.folder / "Exports ü\u3000" / "other").mkdir()
    found = ["Exports ü\u3000/one/whole/Virtual Hard Disks/a.avhdx", "Exports ü\u3000/one/whole/Virtual Hard Disks/b.vhdx"]
    assert smb_shares.files_beneath(place, "Exports ü\u3000/one") == found
    for _ in range(2):
        smb_shares.remove_folder(place, "Exports ü\u3000/one", ENDINGS)
    assert [one.name for one in (share.folder / "Exports ü\u3000").iterdir()] == ["other"]
    with pytest.raises(NotFound):
        smb_shares.files_beneath(place, "Exports ü\u3000/one")


def test_a_file_that_somebody_reads_keeps_the_folder(share: Samba) -> None:
    """An export that is not over yet: what is in use is not taken away from under it."""
    place = there(share)
    smb_shares.make_folder(place, "used")
    (share.folder / "used" / "a.vhdx").write_bytes(b"x")
    other = SmbPlace(place)
    handle = other.handle("used/a.vhdx")
    try:
        with pytest.raises(DiskReadFailed, match="has a file of it open"):
            smb_shares.remove_folder(place, "used", ENDINGS)
    finally:
        handle.close()
        other.close()
    smb_shares.remove_folder(place, "used", ENDINGS)
    assert not (share.folder / "used").exists()


def test_what_is_not_ours_stays(share: Samba) -> None:
    """Also behind a link, which Samba shows as the folder that it leads to."""
    place = there(share)
    (share.folder / "kept").mkdir(exist_ok=True)
    (share.folder / "kept" / "a").write_bytes(b"kept")
    smb_shares.make_folder(place, "linked/ours")
    (share.folder / "linked" / "leads").symlink_to("../kept")
    (share.folder / "linked" / "ours" / "A.VHDX").write_bytes(b"x")
    smb_shares.remove_folder(place, "linked", ENDINGS)
    assert (share.folder / "kept" / "a").read_bytes() == b"kept"
    assert [one.name for one in (share.folder / "linked").iterdir()] == ["leads"]


def test_what_is_no_export_is_not_walked(share: Samba) -> None:
    smb_shares.make_folder(there(share), "deep/1/2/3/4/5/6")
    with pytest.raises(MalformedArchive, match="deeper"):
        smb_shares.remove_folder(there(share), "deep", ENDINGS)
    for path in ("a\\b", "a\n"):
        with pytest.raises(NotFound):
            smb_shares.make_folder(there(share), path)


def test_a_connection_that_breaks_is_made_again(share: Samba, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSES_S", (0.01,) * 7)
    with wire(share.port) as between:
        between.cuts = {1: 1200, 2: 1500}
        smb_shares.make_folder(remote(f"smb://127.0.0.1:{between.port}/disks/", credentials=LOGIN), "cut/here")
        assert between.connections >= 2
    assert (share.folder / "cut" / "here").is_dir()


def test_who_refuses_us_is_reported(share: Samba) -> None:
    wrong = remote(share.url, credentials=(("username", "root"), ("password", "another")))
    for use in (smb_shares.protection, lambda request: smb_shares.make_folder(request, "x")):
        with pytest.raises(AuthFailed):
            use(wrong)
    with pytest.raises(NotFound):
        smb_shares.protection(remote(f"smb://127.0.0.1:{share.port}/not-there/", credentials=LOGIN))
    with pytest.raises(SourceUnreachable):
        smb_shares.protection(remote(f"smb://127.0.0.1:{free_port()}/disks/", credentials=LOGIN))
