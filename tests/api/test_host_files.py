"""Browsing the import root, and saying what is in it, on a real server."""

import contextlib
import io
import os
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from synvirt.offline import browsing
from synvirt.offline.registry import detect
from tests.api.test_problems import assert_problem
from tests.counted import bytes_read
from tests.fakes.service import Service
from tests.offline import appliances

GIB = 1 << 30


@pytest.fixture
def imports(service: Service) -> Path:
    return service.settings.imports_dir


def names(client: httpx.Client, **query: Any) -> list[str]:
    answer = client.get("/host-files", params=query)
    assert answer.status_code == 200, answer.text
    return [entry["name"] for entry in answer.json()["entries"]]


# ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_is_shown_folders_first_with_kinds_and_sizes(client: httpx.Client, imports: Path) -> None:
    (imports / "zone").mkdir()
    archive = appliances.archive(imports / "web.ova", appliances.appliance("qemu_user"))
    (imports / "notes.txt").write_text("hello")
    os.utime(imports / "notes.txt", (0, 1_700_000_000.25))
    answer = client.get("/host-files").json()
    assert (answer["path"], answer["parent"], answer["next_cursor"]) == (str(imports), None, None)
    shown = [(entry["name"], entry["type"], entry["size_bytes"], entry["offline_kind"]) for entry in answer["entries"]]
    assert shown == [
        ("zone", "directory", None, None),
        ("notes.txt", "file", 5, None),
        ("web.ova", "file", archive.stat().st_size, "ova_archive"),
    ]
    assert answer["entries"][1]["modified_at"] == "2023-11-14T22:13:20.250Z"
    for entry in answer["entries"]:
        assert entry["path"] == str(imports / entry["name"])
    below = client.get("/host-files", params={"path": answer["entries"][0]["path"]}).json()
    assert (below["path"], below["parent"], below["entries"]) == (str(imports / "zone"), str(imports), [])


@pytest.mark.parametrize("path", ["", ".", "./", "zone/..", "{root}", "{root}/zone/.."])
def test_the_import_root_by_many_names(client: httpx.Client, imports: Path, path: str) -> None:
    (imports / "zone").mkdir()
    answer = client.get("/host-files", params={"path": path.format(root=imports)}).json()
    assert (answer["path"], answer["parent"]) == (str(imports), None)


def test_a_vm_that_is_a_folder_has_a_kind(client: httpx.Client, imports: Path) -> None:
    appliances.folder(imports / "web", appliances.appliance("qemu_user"))
    [entry] = client.get("/host-files").json()["entries"]
    assert (entry["type"], entry["offline_kind"]) == ("directory", "ovf_folder")


def test_links_are_shown_as_what_they_lead_to_and_only_within(client: httpx.Client, imports: Path, tmp_path: Path) -> None:
    (imports / "zone").mkdir()
    (imports / "notes.txt").write_text("hello")
    (imports / "a-file").symlink_to("notes.txt")
    (imports / "a-folder").symlink_to("zone")
    (imports / "zone" / "up").symlink_to("../notes.txt")
    (imports / "nowhere").symlink_to("absent")
    (imports / "loop").symlink_to("loop")
    (imports / "out").symlink_to(tmp_path)
    (imports / "out-file").symlink_to("../migrator.db")
    (imports / "absolute").symlink_to(imports / "notes.txt")
    entries = client.get("/host-files").json()["entries"]
    assert [(entry["name"], entry["type"], entry["size_bytes"]) for entry in entries] == [
        ("a-folder", "directory", None),
        ("zone", "directory", None),
        ("a-file", "file", 5),
        ("notes.txt", "file", 5),
    ]
    assert names(client, path="a-folder") == ["up"]


def test_what_is_neither_file_nor_folder_is_not_shown_and_not_opened(client: httpx.Client, imports: Path) -> None:
    os.mkfifo(imports / "pipe")
    (imports / "to-pipe").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(imports / "sock"))
        assert names(client) == []


def test_uploads_have_a_list_of_their_own(client: httpx.Client, imports: Path) -> None:
    upload = client.post("/uploads", files={"file": ("web.ova", b"data")}).json()
    (imports / "link").symlink_to(".uploads")
    (imports / "zone").mkdir()
    (imports / "zone" / ".uploads").mkdir()
    assert names(client) == ["link", "zone"]
    assert names(client, path="zone") == [".uploads"], "one of that name elsewhere is the operator's"
    for path in (".uploads", "link", str(Path(upload["path"]).parent), f"link/{upload['id']}"):
        assert_problem(client.get("/host-files", params={"path": path}), 404, "E_MIG_NOT_FOUND")


def test_odd_names_break_nothing(client: httpx.Client, imports: Path) -> None:
    odd = [b"\xff\xfe.ova", b"a\nb", b"\x1b[31m", b"x" * 255, "\u202eavo.ova".encode(), b"a:b.ova", b"\\", b"..."]
    for name in odd:
        (imports / os.fsdecode(name)).touch()
    (imports / os.fsdecode(b"\xed\xa0\x80")).mkdir()  # half a surrogate pair
    answer = client.get("/host-files")
    assert answer.json()["entries"][0]["type"] == "directory"
    shown = [entry["name"] for entry in answer.json()["entries"][1:]]
    assert shown == [name.decode(errors="replace") for name in sorted(odd)]
    for entry in answer.json()["entries"][1:]:
        if "\ufffd" not in entry["name"]:
            response = client.post("/host-files/inspect", json={"path": entry["path"]})
            assert_problem(response, 400, "E_MIG_UNSUPPORTED_FORMAT")
    page, seen = client.get("/host-files", params={"limit": 1}).json(), []
    while page["next_cursor"]:
        page = client.get("/host-files", params={"limit": 1, "cursor": page["next_cursor"]}).json()
        seen += [entry["name"] for entry in page["entries"]]
    assert seen == shown


@pytest.mark.parametrize("seconds", [-(10**10), 0, 10**10, 2**33])
def test_any_time_of_a_file_can_be_reported(client: httpx.Client, imports: Path, seconds: int) -> None:
    (imports / "old").touch()
    os.utime(imports / "old", (0, seconds))
    [entry] = client.get("/host-files").json()["entries"]
    assert entry["modified_at"].endswith("Z")


def test_a_broken_file_is_only_a_file(client: httpx.Client, imports: Path) -> None:
    """Probing never fails a page, whatever a file begins with."""
    archive = appliances.archive(imports / "web.ova", appliances.appliance("qemu_user")).read_bytes()
    for number, head in enumerate(
        (b"QFI\xfb", b"KDMV" + b"\xff" * 600, b"vhdxfile" + b"\xff" * 70_000, b"# Disk Desc", b"<?xml")
    ):
        (imports / f"broken{number}").write_bytes(head)
    (imports / "cut.ova").write_bytes(archive[:700])
    (imports / "none.vmx").symlink_to("absent.vmx")
    assert len(names(client)) == 7


# ── what is rejected ─────────────────────────────────────────────────────────────────────────────────────────────────

OUTSIDE = [
    "..",
    "../..",
    "../migrator.db",
    "/etc",
    "/",
    "zone/../../x",
    "out",
    "out/hostname",
    "a\0b",
    "x" * 5000,
    "y" * 300,
    "pipe",
]
OUTSIDE += ["{root}/../keyring", "{root}x", "//etc", "http://x/y", "zone/" * 900, "absolute", "loop"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    service = Service(tmp_path_factory.mktemp("service"))
    imports = service.settings.imports_dir
    (imports / "zone").mkdir()
    (imports / "out").symlink_to("/etc")
    (imports / "absolute").symlink_to(imports / "zone")
    (imports / "loop").symlink_to("loop")
    os.mkfifo(imports / "pipe")
    with service.served(), service.local() as client:
        yield client, imports
    service.close()


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: repr(path)[:40])
def test_what_leads_out_is_rejected(guarded: tuple[httpx.Client, Path], path: str) -> None:
    client, imports = guarded
    path = path.format(root=imports)
    problem = assert_problem(client.get("/host-files", params={"path": path}), 400, "E_MIG_HOST_PATH_REJECTED")
    assert len(problem["detail"]) < 9000
    code = "E_MIG_BAD_REQUEST" if len(path) > 4096 else "E_MIG_HOST_PATH_REJECTED"
    assert_problem(client.post("/host-files/inspect", json={"path": path}), 400, code)


def test_a_file_where_a_folder_is_wanted_has_a_title_that_fits(guarded: tuple[httpx.Client, Path]) -> None:
    client, imports = guarded
    (imports / "zone/plain").write_bytes(b"x")
    problem = assert_problem(client.get("/host-files", params={"path": "zone/plain"}), 400, "E_MIG_HOST_PATH_REJECTED")
    assert (problem["detail"], "leaves" in problem["title"]) == ("'zone/plain' is not a folder", False)


def test_what_is_not_there(guarded: tuple[httpx.Client, Path]) -> None:
    client, _ = guarded
    assert_problem(client.get("/host-files", params={"path": "absent"}), 404, "E_MIG_NOT_FOUND")
    assert_problem(client.post("/host-files/inspect", json={"path": "absent/web.ova"}), 404, "E_MIG_NOT_FOUND")


def test_a_file_is_no_folder(client: httpx.Client, imports: Path) -> None:
    (imports / "notes.txt").touch()
    problem = assert_problem(client.get("/host-files", params={"path": "notes.txt"}), 400, "E_MIG_HOST_PATH_REJECTED")
    assert "not a folder" in problem["detail"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "cursor=", "cursor=%FF", "cursor=Mg==", "cursor=zzzz"])
def test_a_page_that_cannot_be(guarded: tuple[httpx.Client, Path], query: str) -> None:
    client, _ = guarded
    assert_problem(client.get(f"/host-files?{query}"), 400, "E_MIG_BAD_REQUEST")


@pytest.mark.parametrize("body", [{}, {"path": ""}, {"path": 1}, {"path": "x", "more": 1}, []])
def test_a_body_that_is_wrong(guarded: tuple[httpx.Client, Path], body: Any) -> None:
    client, _ = guarded
    assert_problem(client.post("/host-files/inspect", json=body), 400, "E_MIG_BAD_REQUEST")


def test_a_folder_that_becomes_a_link_out_meanwhile_shows_nothing_outside(service: Service, client: httpx.Client) -> None:
    """`zone` is by turns a folder and a link to one outside, as fast as can be."""
    imports, outside = service.settings.imports_dir, service.settings.data_dir / "outside"
    for folder, name in ((imports / "inside", "mine.txt"), (outside, "secret.txt")):
        folder.mkdir()
        (folder / name).write_text("x")
    (imports / "link").symlink_to(outside)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for name in ("inside", "link"):
                (imports / name).rename(imports / "zone")
                (imports / "zone").rename(imports / name)

    thread = threading.Thread(target=swap)
    thread.start()
    seen = set()
    try:
        enough, until = time.monotonic() + 3, time.monotonic() + 60
        while time.monotonic() < enough or ("E_MIG_HOST_PATH_REJECTED" not in seen and time.monotonic() < until):
            answer = client.get("/host-files", params={"path": "zone"})
            assert "secret" not in answer.text
            seen.add(answer.json().get("code", "shown"))
            answer = client.post("/host-files/inspect", json={"path": "zone/secret.txt"})
            assert answer.json()["code"] in ("E_MIG_HOST_PATH_REJECTED", "E_MIG_NOT_FOUND")
            assert "secret" not in client.get("/host-files").text
    finally:
        done.set()
        thread.join()
    assert "E_MIG_HOST_PATH_REJECTED" in seen


# ── large folders ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_thousands_of_entries_page_steadily_and_only_a_pages_own_are_opened(
    client: httpx.Client, imports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that come and go meanwhile shift no page."""
    for number in range(5000):
        (imports / f"disk{number:05}.img").touch()
    (imports / "zzz").mkdir()
    probed: list[str] = []

    def counted(path: Any, root: Path) -> Any:
        probed.append(str(path))
        return detect(path, root)

    monkeypatch.setattr(browsing, "detect", counted)
    seen: list[str] = []
    cursor = None
    while True:
        page = client.get("/host-files", params={"limit": 100} | ({"cursor": cursor} if cursor else {})).json()
        seen += [entry["name"] for entry in page["entries"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        if len(seen) > 1:
            (imports / seen[-1]).rename(imports / f"aaa{len(seen)}")
    assert seen == ["zzz", *(f"disk{number:05}.img" for number in range(5000))]
    assert len(probed) == 5001


def test_a_full_last_page_has_no_next(client: httpx.Client, imports: Path) -> None:
    for name in "abcd":
        (imports / name).touch()
    page = client.get("/host-files", params={"limit": 2}).json()
    page = client.get("/host-files", params={"limit": 2, "cursor": page["next_cursor"]}).json()
    assert ([entry["name"] for entry in page["entries"]], page["next_cursor"]) == (["c", "d"], None)


# ── what is in a file ────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_in_a_file(client: httpx.Client, imports: Path) -> None:
    archive = appliances.archive(imports / "web.ova", appliances.appliance("qemu_user"))
    (imports / "link.ova").symlink_to("web.ova")
    for path in (str(archive), "web.ova", "link.ova"):
        answer = client.post("/host-files/inspect", json={"path": path}).json()
        assert set(answer) == {"offline_kind", "manifest"}
        assert answer["offline_kind"] == "ova_archive"
        assert answer["manifest"]["disks"]


def test_what_is_no_vm_says_so(client: httpx.Client, imports: Path) -> None:
    (imports / "web.ova.gz").write_bytes(b"\x1f\x8b" + bytes(100))
    problem = assert_problem(client.post("/host-files/inspect", json={"path": "web.ova.gz"}), 400, "E_MIG_UNSUPPORTED_FORMAT")
    assert "gunzip" in problem["hint"]
    archive = appliances.archive(imports / "web.ova", appliances.appliance("qemu_user"))
    os.truncate(archive, 2000)
    assert_problem(client.post("/host-files/inspect", json={"path": "web.ova"}), 400, "E_MIG_MALFORMED_ARCHIVE")


@pytest.mark.parametrize("name", ["web.tar", "web.ova", "web.img"])
def test_an_archive_without_a_description_is_no_raw_disk(client: httpx.Client, imports: Path, name: str) -> None:
    """A folder of VMware's, packed. As a raw disk its bytes would become a volume of nonsense."""
    with tarfile.open(imports / name, "w") as archive:
        for member in ("web/web.vmx", "web/web.vmdk"):
            archive.addfile(tarfile.TarInfo(member))
    problem = assert_problem(client.post("/host-files/inspect", json={"path": name}), 400, "E_MIG_UNSUPPORTED_FORMAT")
    assert f"{name} is a tar archive without a VM's description" in problem["detail"]
    assert problem["hint"].startswith("Unpack it")


def test_an_archive_of_100_gib_is_looked_into_and_not_read(client: httpx.Client, imports: Path) -> None:
    """Most of it is a hole: what matters is how much of it is read."""
    files = appliances.appliance("qemu_user")
    [disk] = [name for name in files if not name.endswith((".ovf", ".mf"))]
    path = imports / "large.ova"
    with path.open("wb") as file:
        for name, data in files.items():
            if name.endswith(".mf"):
                continue
            member = tarfile.TarInfo(name)
            member.size = 100 * GIB if name == disk else len(data)
            file.write(member.tobuf(tarfile.GNU_FORMAT))
            file.write(data)
            file.truncate(file.tell() + (-file.tell()) % 512)
            file.seek(0, io.SEEK_END)
            if name == disk:
                file.seek(member.size - len(data), io.SEEK_CUR)
        file.write(bytes(1024))
    assert path.stat().st_size > 100 * GIB
    inspect = client.build_request("POST", "/host-files/inspect", json={"path": "large.ova"})
    client.send(inspect)  # modules are imported
    for request in (inspect, client.build_request("GET", "/host-files")):
        with bytes_read() as count:
            answer = client.send(request)
        assert answer.status_code == 200, answer.text
        assert "ova_archive" in answer.text
        assert count.bytes < 4 << 20


def test_many_ask_at_once(service: Service, client: httpx.Client) -> None:
    appliances.archive(service.settings.imports_dir / "web.ova", appliances.appliance("qemu_user"))
    answers: list[str] = []

    def ask() -> None:
        with service.local() as own, contextlib.suppress(httpx.HTTPError):
            answers.append(own.post("/host-files/inspect", json={"path": "web.ova"}).text)

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [client.post("/host-files/inspect", json={"path": "web.ova"}).text] * 16
