"""Every kind that can be read from elsewhere, by HTTP, from S3 and by SMB: the same VM and the same disks as from here."""

import contextlib
import gzip
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
from pydantic import SecretStr

from synvirt import programs
from synvirt.disks import open_reader
from synvirt.disks.checking.checksum import check
from synvirt.errors import BadRequest, MalformedArchive, NotFound, SynvirtError, UnsupportedFormat
from synvirt.model.access import RemoteFileRequest, RemoteOptions
from synvirt.model.files import Inspection
from synvirt.offline import browsing
from synvirt.offline.elsewhere import Rules, joined, name_of, place, separated
from synvirt.offline.registry import detect
from synvirt.remote import places
from synvirt.remote.places import connected, requested_bytes
from tests.contracts.readers import read_all
from tests.disks.xva import xva_archives
from tests.offline import appliances, vbox_machines
from tests.offline.xva import ova_xml_text
from tests.servers import remote_servers as servers

RULES = Rules(allowed_hosts=servers.LOOPBACK)


@dataclass(frozen=True)
class Elsewhere:
    """`put` copies a file or folder of this host there; `asked` is what a caller says to have it read."""

    put: Callable[[Path], None]
    asked: Callable[[str], RemoteFileRequest]
    lists: bool


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    with servers.nginx(tmp_path_factory.mktemp("nginx")) as server:
        secrets = {"username": SecretStr(servers.USER), "password": SecretStr(servers.PASSWORD)}
        options = RemoteOptions(fingerprint_sha256=server.certificates.fingerprint)
        url = f"https://127.0.0.1:{server.tls_port}/private/"

        def asked(name: str) -> RemoteFileRequest:
            return RemoteFileRequest(url=url + name.replace(" ", "%20"), credentials=secrets, options=options)

        yield Elsewhere(lambda path: _copied(path, server.folder), asked, lists=False)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    with servers.s3(tmp_path_factory.mktemp("s3")) as server:
        secrets = {
            "access_key_id": SecretStr(server.access_key_id),
            "secret_access_key": SecretStr(server.secret_access_key),
        }
        options = RemoteOptions(endpoint=server.endpoint)

        def put(path: Path) -> None:
            for file in [path] if path.is_file() else path.rglob("*"):
                if file.is_file():
                    server.put(str(file.relative_to(path.parent)), file.read_bytes())

        def asked(name: str) -> RemoteFileRequest:
            return RemoteFileRequest(url=f"s3://{server.bucket}/{name}", credentials=secrets, options=options)

        yield Elsewhere(put, asked, lists=True)


@pytest.fixture(scope="module")
def smb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    with servers.samba(tmp_path_factory.mktemp("samba")) as server:
        secrets = {"username": SecretStr("root"), "password": SecretStr(servers.PASSWORD)}

        def asked(name: str) -> RemoteFileRequest:
            return RemoteFileRequest(url=server.url + name.replace(" ", "%20"), credentials=secrets)

        yield Elsewhere(lambda path: _copied(path, server.folder), asked, lists=True)


def _copied(path: Path, folder: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
    elif path.stat().st_size > 1 << 30:  # a hole: linked, not copied
        (folder / path.name).hardlink_to(path)
    else:
        shutil.copy(path, folder)


@pytest.fixture(params=["http", "s3", "smb"])
def elsewhere(request: pytest.FixtureRequest) -> Elsewhere:
    made: Elsewhere = request.getfixturevalue(request.param)
    return made


# ── each kind ────────────────────────────────────────────────────────────────────────────────────────────────────────


def ova(folder: Path) -> Path:
    return appliances.archive(folder / "win srv.ova", appliances.appliance())


def ovf(folder: Path) -> Path:
    return appliances.folder(folder / "winsrv", appliances.appliance()) / "ovftool.ovf"


def xva(folder: Path) -> Path:
    disks = {"Ref:4": appliances.raw_disk(), "Ref:5": appliances.raw_disk(3 << 20, seed=2)}
    text = ova_xml_text.whole({name: len(disk) for name, disk in disks.items()})
    return xva_archives.archive(folder / "web.xva", text, disks, keepalives={3})


def qcow2(folder: Path) -> Path:
    """With a backing file beside it."""
    base = appliances.image(folder / "chain", "base.qcow2", "qcow2", appliances.raw_disk())
    top = base.with_name("top.qcow2")
    programs.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base.name, "-F", "qcow2", str(top)], timeout_s=60)
    return top


def vmdk(folder: Path) -> Path:
    """Split into extents beside its descriptor."""
    raw = appliances.raw_disk(5 << 20, seed=5)
    return appliances.image(folder / "split", "split.vmdk", "vmdk", raw, "subformat=twoGbMaxExtentSparse")


def stream_vmdk(folder: Path) -> Path:
    return appliances.stream_vmdk(folder, "stream.vmdk", appliances.raw_disk())


def vhdx(folder: Path) -> Path:
    return appliances.image(folder, "web.vhdx", "vhdx", appliances.raw_disk())


def vmx(folder: Path) -> Path:
    (folder / "web" / "data").mkdir(parents=True)
    (folder / "web" / "web.vmx").write_bytes((appliances.DESCRIPTIONS / "workstation.vmx").read_bytes())
    for number, name in enumerate(("fast.vmdk", "web.vmdk", "data/web data.vmdk")):
        (folder / "web" / name).write_bytes(appliances.disk_file("vmdk", appliances.DISK_BYTES, number))
    return folder / "web" / "web.vmx"


def vbox(folder: Path) -> Path:
    return vbox_machines.machine(folder / "box") / "web.vbox"


KINDS = MappingProxyType(
    {
        "ova_archive": ova,
        "ovf_folder": ovf,
        "xva_archive": xva,
        "qcow2": qcow2,
        "vmdk": vmdk,
        "vhdx": vhdx,
        "vmx_folder": vmx,
        "vbox_folder": vbox,
    }
)


def _as_elsewhere(here: Inspection, elsewhere: Inspection) -> Inspection:
    """What an image's own tables call data is read here alone."""
    pairs = list(zip(here.manifest.disks, elsewhere.manifest.disks, strict=True))
    assert all(other.used_bytes in (None, disk.used_bytes) for disk, other in pairs)
    disks = tuple(disk.model_copy(update={"used_bytes": other.used_bytes}) for disk, other in pairs)
    return here.model_copy(update={"manifest": here.manifest.model_copy(update={"disks": disks})})


def assert_same(elsewhere: Elsewhere, url: str, path: Path, root: Path, kind: str) -> None:
    request = elsewhere.asked(url)
    inspection = browsing.inspect(place(request, RULES)[1], str(place(request, RULES)[0]))
    here = browsing.inspect(root, str(path))
    assert inspection == _as_elsewhere(here, inspection)
    assert inspection.offline_kind == kind
    there, remote = place(request, RULES)
    # As a job does it: one login, however many files are opened.
    with connected(remote):
        importer = detect(there, remote)
        keys = [disk.key for disk in inspection.manifest.disks]
        disks = [(importer.open_disk(there, remote, key), importer.open_disk(path, root, key)) for key in keys]
    for opened, local in disks:
        one, other = open_reader(opened.reader), open_reader(local.reader)
        assert read_all(one) == read_all(other)
        one.close()
        other.close()
        assert len(opened.checksums) == len(local.checksums)
        for checksum in opened.checksums:
            check(checksum)
    assert places._connections == {}, "a place is still connected to"


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_vm_that_it_is_here(elsewhere: Elsewhere, tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path)
    top = tmp_path / path.relative_to(tmp_path).parts[0]
    elsewhere.put(top)
    assert_same(elsewhere, str(path.relative_to(tmp_path)), path, tmp_path, kind)


@pytest.mark.parametrize("kind", ["ovf_folder", "vmx_folder", "vbox_folder"])
def test_a_folder_by_its_own_url_where_it_can_be_listed(elsewhere: Elsewhere, tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path).parent
    elsewhere.put(path)
    if elsewhere.lists:
        assert_same(elsewhere, f"{path.name}/", path, tmp_path, kind)
    else:
        with pytest.raises(BadRequest, match="which HTTP cannot list"):
            place(elsewhere.asked(f"{path.name}/"), RULES)


def test_a_file_that_belongs_to_it_is_missing(elsewhere: Elsewhere, tmp_path: Path) -> None:
    path = vmx(tmp_path / "incomplete")
    path.with_name("web.vmdk").unlink()
    path.parent.rename(tmp_path / "lacking")
    elsewhere.put(tmp_path / "lacking")
    there, remote = place(elsewhere.asked("lacking/web.vmx"), RULES)
    with pytest.raises(MalformedArchive, match=r"web\.vmdk"):
        detect(there, remote).inspect(there, remote)
    assert places._connections == {}


FLAT = """\
# Disk DescriptorFile
version=1
CID=1
parentCID=ffffffff
createType="monolithicFlat"
RW 2048 FLAT "{}" 0
"""


def test_what_an_image_names_is_looked_for_beside_it_and_nowhere_else(elsewhere: Elsewhere, tmp_path: Path) -> None:
    secret = tmp_path / "secret.raw"
    secret.write_bytes(b"s" * (1 << 20))
    elsewhere.put(secret)
    folder = tmp_path / "prison"
    folder.mkdir()
    for name in ("../secret.raw", "/etc/passwd", "https://127.0.0.1/x", str(secret)):
        (folder / "flat.vmdk").write_text(FLAT.format(name))
        elsewhere.put(folder)
        there, remote = place(elsewhere.asked("prison/flat.vmdk"), RULES)
        importer = detect(there, remote)
        found = [concern.id for concern in _concerns_or_error(importer.inspect, there, remote)]
        assert found in (["disk-unreadable:disk0"], ["E_MIG_MALFORMED_ARCHIVE"], ["E_MIG_HOST_PATH_REJECTED"]), (name, found)


@dataclass(frozen=True)
class _Named:
    id: str


def _concerns_or_error(inspect: Callable[..., object], *arguments: object) -> list[_Named]:
    try:
        manifest = inspect(*arguments)
    except SynvirtError as error:
        return [_Named(error.code)]
    return [_Named(concern.id) for concern in manifest.concerns if concern.category == "Critical"]  # type: ignore[attr-defined]


def test_a_tar_that_is_compressed_has_no_ranges(elsewhere: Elsewhere, tmp_path: Path) -> None:
    path = tmp_path / "web.ova.gz"
    path.write_bytes(gzip.compress(ova(tmp_path).read_bytes()))
    elsewhere.put(path)
    there, remote = place(elsewhere.asked("web.ova.gz"), RULES)
    with pytest.raises(UnsupportedFormat, match="gzip"):
        detect(there, remote)


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_an_xva_that_is_compressed_is_read_forwards(elsewhere: Elsewhere, tmp_path: Path, packing: str) -> None:
    path = xva_archives.packed(xva(tmp_path), packing).rename(tmp_path / "packed.xva")
    elsewhere.put(path)
    assert_same(elsewhere, path.name, path, tmp_path, "xva_archive")


def test_not_there(elsewhere: Elsewhere) -> None:
    there, remote = place(elsewhere.asked("gone.ova"), RULES)
    with pytest.raises(NotFound):
        detect(there, remote)


@pytest.mark.parametrize("tells", ["ETag", "Last-Modified", ""])
def test_a_file_whose_server_tells_nothing_of_its_version_is_a_concern(tmp_path: Path, tells: str) -> None:
    """Another file of its size, put in its place while it is read, would be half of the disk."""
    image = appliances.image(tmp_path, "web.qcow2", "qcow2", appliances.raw_disk(1 << 20, seed=1)).read_bytes()

    def script(request: servers.RangeRequest) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = servers.honest(image, request)
        del headers["ETag"]
        return status, headers | ({tells: "Fri, 27 Nov 2026 10:00:00 GMT"} if tells else {}), body

    with servers.scripted(script) as url:
        there, remote = place(RemoteFileRequest(url=f"{url}web.qcow2"), RULES)
        manifest = detect(there, remote).inspect(there, remote)
    unversioned = [concern.id for concern in manifest.concerns if concern.category == "Warning"]
    assert ("disk-unversioned:disk0" in unversioned) == (not tells)


# ── how much is read ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["ova", "xva"])
def test_inspecting_a_large_archive_reads_a_few_pieces_of_it(http: Elsewhere, tmp_path: Path, kind: str) -> None:
    """With a member of 200 GiB in the middle: read are headers, the description, the disks' own headers and tables."""
    path = tmp_path / f"large.{kind}"
    small = ova(tmp_path) if kind == "ova" else xva(tmp_path)
    large = tarfile.TarInfo("Ref:6/00000000")
    large.size = 200 << 30
    content = small.read_bytes()
    first = 512 + -(-int(content[124:135], 8) // 512) * 512  # the description's header and data
    with path.open("wb") as file:
        file.write(content[:first])
        file.write(large.tobuf(tarfile.GNU_FORMAT))
        file.seek(large.size, 1)
        file.write(content[first:])
    http.put(path)
    there, remote = place(http.asked(path.name), RULES)
    with connected(remote):
        manifest = detect(there, remote).inspect(there, remote)
        assert len(manifest.disks) == 2
        assert requested_bytes(remote, path.name) < (1 << 20 if kind == "ova" else 8 << 20)


# ── what a caller says ───────────────────────────────────────────────────────────────────────────────────────────────


def test_secrets_are_taken_out_and_put_back() -> None:
    request = RemoteFileRequest(url="https://user:p%40ss@host.example:8443/a%20b/vm.ova?X-Amz-Signature=5161#part")
    public, secrets = separated(request)
    assert public.url == "https://host.example:8443/a%20b/vm.ova"
    assert public.credentials == {}
    assert secrets is not None
    there, remote = place(joined(public, secrets), Rules())
    assert (there, remote.url, remote.query) == (Path("vm.ova"), "https://host.example:8443/a%20b/", "X-Amz-Signature=5161")
    assert remote.credentials == (("password", "p@ss"), ("username", "user"))
    assert place(request, Rules()) == (there, remote)
    for text in (repr(remote), str(public), public.model_dump_json(), repr(remote.guard)):
        assert "p@ss" not in text
        assert "5161" not in text
    assert separated(public) == (public, None)
    assert name_of(request) == "vm.ova"


@pytest.mark.parametrize(
    ("url", "path", "folder"),
    [
        ("s3://bucket/vm.ova", "vm.ova", "s3://bucket/"),
        ("s3://bucket/a b/100%.ova", "100%.ova", "s3://bucket/a b/"),
        ("s3://bucket/folder/", ".", "s3://bucket/folder/"),
        ("smb://nas/share/vm.vhdx", "vm.vhdx", "smb://nas/share/"),
        ("smb://nas:1445/share/a%20b/vm%20.vhdx", "vm .vhdx", "smb://nas:1445/share/a%20b/"),
        ("http://[2001:db8::1]:81/vm.ova", "vm.ova", "http://[2001:db8::1]:81/"),
        ("https://bücher.example/ä.ova", "ä.ova", "https://xn--bcher-kva.example/"),
    ],
)
def test_urls_are_a_folder_and_a_path(url: str, path: str, folder: str) -> None:
    there, remote = place(RemoteFileRequest(url=url), Rules())
    assert (str(there), remote.url) == (path, folder)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("smb://nas/share", "no file"),
        ("smb://nas/", "no file"),
        ("https://host/folder/", "which HTTP cannot list"),
        ("https://host/a/../../b.ova", "«..»"),
        ("https://host/a/%2e%2e/b.ova", "«..»"),
        ("https:///b.ova", "no host"),
        ("https://host:99999/b.ova", "port"),
        ("https://ho st/b.ova", "blanks"),
        ("https://ho\u2028st/b.ova", "host"),
    ],
)
def test_urls_that_are_none(url: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        place(RemoteFileRequest(url=url), Rules())


def test_credentials_of_another_protocol() -> None:
    request = RemoteFileRequest(url="s3://bucket/x", credentials={"password": SecretStr("hush")})
    with pytest.raises(BadRequest, match="s3 has no password") as caught:
        place(request, Rules())
    assert "hush" not in str(caught.value)
    with pytest.raises(BadRequest, match="characters"):
        place(RemoteFileRequest(url="https://h/x", credentials={"token": SecretStr("a\r\nHost: b")}), Rules())


def test_a_domain_in_a_url() -> None:
    _, remote = place(RemoteFileRequest(url="smb://LAB;me:p%40ss@nas/share/x.vhdx"), Rules())
    assert remote.credentials == (("domain", "LAB"), ("password", "p@ss"), ("username", "me"))


def test_garbage_in_a_url_is_our_error() -> None:
    numbers = random.Random(9)
    for _ in range(2000):
        tail = "".join(chr(numbers.choice([numbers.randrange(33, 127), numbers.randrange(160, 0x2FFF)])) for _ in range(30))
        with contextlib.suppress(BadRequest):
            request = RemoteFileRequest(url=numbers.choice(["http://", "https://", "s3://", "smb://"]) + tail)
            place(request, Rules())
            separated(request)
