"""Nothing outside the folder is ever opened: by the kernel's walk, by our own, under races, by any spelling."""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.disks import beneath
from synvirt.disks.beneath import open_beneath, open_reference, resolve_beneath
from synvirt.errors import HostPathRejected, MalformedArchive, NotFound, SynvirtError
from tests.running.processes import open_files


@pytest.fixture(params=["kernel", "steps"])
def walk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every law holds with openat2 and where the system has none."""
    if request.param == "steps":

        def absent(folder: int, name: str) -> int:
            raise OSError(errno.ENOSYS, "no such call")

        monkeypatch.setattr(beneath, "_openat2", absent)
    return str(request.param)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "imports"
    (root / "vm" / "snapshots").mkdir(parents=True)
    (root / "vm" / "disk.vmdk").write_text("inside")
    (root / "top.vmdk").write_text("top")
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "imports-too").mkdir()
    (tmp_path / "imports-too" / "secret").write_text("outside")
    return root


def content(descriptor: int) -> str:
    with os.fdopen(descriptor) as file:
        return file.read()


@pytest.mark.parametrize(
    "name",
    [
        "vm/disk.vmdk",
        "./vm//disk.vmdk",
        "vm/snapshots/../disk.vmdk",
        "vm/../vm/disk.vmdk",
        "{root}/vm/disk.vmdk",
        "/{root}/vm/disk.vmdk",
    ],
)
def test_opens_what_lies_beneath(tree: Path, walk: str, name: str) -> None:
    name = name.format(root=tree)
    assert content(open_beneath(tree, name)) == "inside"
    assert resolve_beneath(tree, name) == tree / "vm" / "disk.vmdk"


def test_follows_links_that_stay_beneath(tree: Path, walk: str) -> None:
    (tree / "vm" / "snapshots" / "base.vmdk").symlink_to("../disk.vmdk")
    (tree / "alias").symlink_to("vm/snapshots")
    assert content(open_beneath(tree, "alias/base.vmdk")) == "inside"
    assert resolve_beneath(tree, "alias/base.vmdk") == tree / "vm" / "disk.vmdk"


def test_the_root_may_itself_be_a_link(tree: Path, walk: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tree)
    assert content(open_beneath(link, f"{link}/vm/disk.vmdk")) == "inside"
    assert resolve_beneath(link, f"{tree}/vm/disk.vmdk") == tree / "vm" / "disk.vmdk"


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "vm/../../secret",
        "/etc/passwd",
        "{root}/../secret",
        "{root}-too/secret",
        "json:{{}}",
        "nbd://localhost:10809/x",
        "nbd:unix:/run/x",
        "file:vm/disk.vmdk",
        "C:\\disks\\disk.vmdk",
        "vm/disk.vmdk\0.txt",
        "",
        "x" * 5000,
        "\ud800",
        "out",
        "out-absolute",
        "out-folder/secret",
        "loop",
        "proc/self/root/etc/passwd",
    ],
)
def test_refuses_what_leads_out(tree: Path, walk: str, name: str, tmp_path: Path) -> None:
    (tree / "out").symlink_to("../secret")
    (tree / "out-absolute").symlink_to(tmp_path / "secret")
    (tree / "out-folder").symlink_to("..")
    (tree / "loop").symlink_to("loop")
    (tree / "proc").symlink_to("/proc")
    name = name.format(root=tree)
    with pytest.raises(HostPathRejected):
        open_beneath(tree, name)
    with pytest.raises(HostPathRejected):
        resolve_beneath(tree, name)


def test_a_link_in_a_circle_and_one_to_nothing_are_said_to_be_that(tree: Path, walk: str) -> None:
    (tree / "one").symlink_to("other")
    (tree / "other").symlink_to("one")
    with pytest.raises(HostPathRejected, match="the links of 'one' lead in a circle"):
        open_beneath(tree, "one")
    (tree / "gone.ova").symlink_to("nothing")
    with pytest.raises(NotFound, match=r"there is no file 'gone\.ova'") as caught:
        resolve_beneath(tree, "gone.ova")
    assert caught.value.hint == "the name is there: it is a link, and what it leads to is missing"


def test_a_name_that_is_no_text_is_said_to_be_that(tree: Path, walk: str) -> None:
    """A list shows it with a sign that its name has not: the hint was the name that was asked for."""
    (tree / os.fsdecode(b"b\xfcro.ova")).write_bytes(b"")
    with pytest.raises(NotFound) as caught:
        resolve_beneath(tree, "b\ufffdro.ova")
    assert caught.value.hint == "the name b\ufffdro.ova is not UTF-8: rename the file first"


def test_refuses_an_absolute_link_even_if_it_comes_back(tree: Path, walk: str) -> None:
    """It means another file as soon as the folder is mounted or copied elsewhere."""
    (tree / "link").symlink_to(tree / "top.vmdk")
    with pytest.raises(HostPathRejected):
        open_beneath(tree, "link")


def test_refuses_pipes_sockets_and_folders_without_opening(tree: Path, walk: str) -> None:
    os.mkfifo(tree / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(tree)  # a socket's path may have 107 bytes
        try:
            listening.bind("socket")
        finally:
            os.chdir(here)
        for name in ("pipe", "socket"):
            with pytest.raises(HostPathRejected):
                open_beneath(tree, name)
            with pytest.raises(HostPathRejected):
                resolve_beneath(tree, name)
    with pytest.raises(HostPathRejected, match="plain file"):
        open_beneath(tree, "vm")
    assert resolve_beneath(tree, "vm") == tree / "vm"


@pytest.mark.parametrize("name", ["none", "none/disk.vmdk", "top.vmdk/x"])
def test_says_what_is_missing(tree: Path, walk: str, name: str) -> None:
    with pytest.raises(NotFound, match="no file"):
        open_beneath(tree, name)


def test_leaks_no_descriptor(tree: Path, walk: str) -> None:
    for name in ("vm/disk.vmdk", "../secret", "none", "vm", "vm/../../x", "json:"):
        try:
            os.close(open_beneath(tree, name))
        except SynvirtError:
            continue
    assert open_files(tree.parent) == []


@pytest.fixture
def swapping(tree: Path, tmp_path: Path) -> Iterator[Path]:
    """`imports/turn` is now a folder, now a link out, as fast as the machine can."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "file").write_text("outside")
    (tree / "good").mkdir()
    (tree / "good" / "file").write_text("inside")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            (tree / "good").rename(tree / "turn")
            (tree / "turn").rename(tree / "good")
            (tree / "turn").symlink_to("../evil")
            (tree / "turn").unlink()

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield tree
    finally:
        stop.set()
        thread.join()


def test_a_rename_in_the_middle_never_leads_out(swapping: Path, walk: str) -> None:
    seen: set[str] = set()
    for _ in range(3000):
        try:
            seen.add(content(open_beneath(swapping, "turn/file")))
        except (HostPathRejected, NotFound) as problem:
            seen.add(type(problem).__name__)
    assert "outside" not in seen
    assert seen & {"inside", "NotFound", "HostPathRejected"}


PARTS = st.sampled_from(["..", ".", "", "vm", "snapshots", "disk.vmdk", "top.vmdk", "out", "up", "secret", "imports", "a:b"])


@settings(max_examples=300)
@given(parts=st.lists(PARTS, min_size=1, max_size=8))
def test_both_walks_agree_on_any_path(tree: Path, parts: list[str]) -> None:
    """The kernel's verdict is the oracle for ours."""
    if not (tree / "out").is_symlink():
        (tree / "out").symlink_to("../secret")
        (tree / "vm" / "up").symlink_to("..")

    def verdict() -> str:
        try:
            return content(open_beneath(tree, "/".join(parts)))
        except SynvirtError as problem:
            return type(problem).__name__

    def absent(folder: int, name: str) -> int:
        raise OSError(errno.EPERM, "refused by a sandbox")

    kernel = verdict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beneath, "_openat2", absent)
        assert verdict() == kernel
    assert kernel != "outside"


def test_a_reference_starts_from_the_images_folder(tree: Path) -> None:
    descriptor, name = open_reference(tree, "vm/snapshots/disk-1.vmdk", "../disk.vmdk")
    assert content(descriptor) == "inside"
    assert resolve_beneath(tree, name) == tree / "vm" / "disk.vmdk"


def test_a_reference_without_a_root_is_refused() -> None:
    with pytest.raises(HostPathRejected, match="may open no other"):
        open_reference(None, "disk.vmdk", "other.vmdk")


@pytest.mark.parametrize("reference", ["../../secret", "/etc/passwd", "json:{}", "nbd://h/x"])
def test_a_reference_that_leaves_is_refused(tree: Path, reference: str) -> None:
    with pytest.raises(HostPathRejected):
        open_reference(tree, "vm/disk.vmdk", reference)


def test_a_missing_reference_makes_the_image_malformed(tree: Path) -> None:
    with pytest.raises(MalformedArchive, match="not there"):
        open_reference(tree, "vm/disk.vmdk", "disk-s001.vmdk")


@pytest.mark.parametrize("reference", ["DISK.VMDK", "./Disk.vmdk", "../VM/disk.VMDK", "../Vm/../VM/Disk.vmdk"])
def test_capitals_of_a_reference_make_no_difference(tree: Path, reference: str) -> None:
    """As on Windows and macOS, which wrote it."""
    opened, name = open_reference(tree, "vm/image.vmdk", reference)
    assert content(opened) == "inside"
    assert resolve_beneath(tree, name) == tree / "vm" / "disk.vmdk"


@pytest.mark.parametrize(("written", "there"), [("Café.vmdk", "Cafe\u0301.vmdk"), ("Cafe\u0301.vmdk", "CAFÉ.vmdk")])
def test_composed_letters_make_no_difference_either(tree: Path, written: str, there: str) -> None:
    (tree / "vm" / there).write_text("accent")
    assert content(open_reference(tree, "vm/image.vmdk", written)[0]) == "accent"


def test_a_reference_is_taken_as_it_is_first_and_never_for_one_of_two_files(tree: Path) -> None:
    (tree / "vm" / "DISK.vmdk").write_text("capitals")
    assert content(open_reference(tree, "vm/image.vmdk", "disk.vmdk")[0]) == "inside"
    assert content(open_reference(tree, "vm/image.vmdk", "DISK.vmdk")[0]) == "capitals"
    with pytest.raises(MalformedArchive, match="not there"):
        open_reference(tree, "vm/image.vmdk", "Disk.vmdk")


def test_another_spelling_leads_out_no_more_than_the_first(tree: Path) -> None:
    (tree / "vm" / "out.vmdk").symlink_to("../../secret")
    (tree / "vm" / "gone.vmdk").symlink_to("nothing")
    for reference, error in (
        ("OUT.vmdk", HostPathRejected),
        ("GONE.vmdk", MalformedArchive),
        ("../../SECRET", HostPathRejected),
    ):
        with pytest.raises(error):
            open_reference(tree, "vm/image.vmdk", reference)
