"""What restore points say is read by a confined child: as a reader here would, and the service itself reads none of it."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4
from xml.etree.ElementTree import tostring

import pytest
from blake3 import blake3

from synvirt import xml_document
from synvirt.backups.restores.domain import foreign, read_here
from synvirt.backups.service import Backups
from synvirt.cage import Network
from synvirt.errors import BackupBadRequest, BackupImmutable, Internal, RepositoryDamaged, SynvirtError
from synvirt.jobs.inspecting import looker, points
from synvirt.jobs.inspecting.look import Look, ReaderKilled
from synvirt.jobs.inspecting.looking import CagedLooking
from synvirt.jobs.inspecting.points import CagedPoints
from synvirt.repository import garbage, peer_needs
from synvirt.repository import manifest as manifests
from synvirt.repository.folder import HostFolder
from synvirt.repository.keys import Keys
from synvirt.repository.manifest import HERE, DiskMap, Manifest, Named, Sealed, Shown, Signature, Unread
from synvirt.repository.peer_offer import Offer
from tests.backups.house import House, disk_content
from tests.fakes.backups import authors_of
from tests.jobs.misbehaving import looker_that_does, misbehaviour
from tests.repository.points import KEY

DOMAIN = "<domain xmlns:q='urn:q'>a<q:b c='d é' q:e='f'/>tail<!-- x --><g><h/></g></domain>"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def caged(looking: CagedLooking) -> CagedPoints:
    return CagedPoints(looking)


def made(point_id: UUID | None = None, xml: str = DOMAIN) -> Unread:
    shown = Shown(id=point_id or uuid4(), created_at="2026-01-01T00:00:00Z", disks=(DiskMap(size_bytes=5, pages=("0" * 64,)),))
    named = Named(target="vda", path="/x", size_bytes=5)
    sealed = Sealed(
        vm_id="v", vm_name="wéb", consistency="offline", job_id=uuid4(), run_id=uuid4(), domain_xml=xml, disks=(named,)
    )
    content = manifests.written(Manifest(shown=shown, sealed=sealed), Keys(KEY), lambda _: Signature(key="k", sshsig="a\nb"))
    return manifests.unread(str(shown.id), content, Keys(KEY))


def changed(shown: Change = lambda _: None, inside: Change = lambda _: None) -> Unread:
    one = made()
    outer, inner = json.loads(one.shown), json.loads(one.inside or b"")
    shown(outer)
    inside(inner)
    return Unread(one.point_id, json.dumps(outer).encode(), json.dumps(inner).encode(), one.signature)


DAMAGED = {
    "no JSON": Unread(str(uuid4()), b"{", b"{"),
    "deep": Unread(str(uuid4()), b"[" * 100_000, b""),
    "another's": changed(lambda shown: shown.update(id=str(uuid4()))),
    "a later format": changed(lambda shown: shown.update(format=2)),
    "pages": changed(lambda shown: shown["disks"][0].update(pages=[])),
    "no name": changed(inside=lambda inside: inside.pop("vm_name")),
    "another size": changed(inside=lambda inside: inside["disks"][0].update(size_bytes=6)),
    "a signature in it": changed(inside=lambda inside: inside.update(signature={"key": "k", "sshsig": "s"})),
}


def details(found: list[Any]) -> list[object]:
    return [one.detail if isinstance(one, RepositoryDamaged) else one for one in found]


def test_a_child_reads_as_a_reader_here_does(caged: CagedPoints) -> None:
    many = [made(), *DAMAGED.values(), made()]
    assert details(caged.manifests(many)) == details(HERE.manifests(many))
    assert details(caged.shown(many)) == details(HERE.shown(many))
    assert [isinstance(one, Manifest) for one in caged.manifests(many)] == [True, *[False] * len(DAMAGED), True]
    assert caged.manifests([]) == []
    whole = made()
    [found] = caged.manifests([whole])
    assert isinstance(found, Manifest)
    assert found.sealed.signature == whole.signature == Signature(key="k", sshsig="a\nb")


@pytest.mark.parametrize(
    "xml", [DOMAIN, "<a", "<!DOCTYPE a><a/>", "<a>" * 101 + "</a>" * 101, "\ud800", "<domain>\udc80</domain>"]
)
def test_so_does_one_of_domains(caged: CagedPoints, xml: str) -> None:
    def outcome(read: Callable[[str], Any]) -> object:
        try:
            return tostring(read(xml))
        except RepositoryDamaged as error:
            return type(error)

    assert outcome(caged.domain_xml) == outcome(read_here)


def test_a_thousand_points_are_few_children(caged: CagedPoints, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Look] = []
    ask = caged._looking.ask

    def counted(look: Look) -> Any:
        looks.append(look)
        return ask(look)

    monkeypatch.setattr(caged._looking, "ask", counted)
    many = [made() for _ in range(manifests.BATCH_MAX + 1)]
    found = [one for batch in manifests.in_batches(many) for one in caged.manifests(batch)]
    assert [str(one.shown.id) for one in found if isinstance(one, Manifest)] == [one.point_id for one in many]
    assert len(looks) == 2


def test_what_reads_a_point_has_neither_key_nor_file_nor_network(caged: CagedPoints) -> None:
    cage = looker.cage_of(Look("manifests", None, "a point", 1, contents=(b"x",)), None)
    assert (cage.reads, cage.writes, cage.network, cage.programs) == ((), (), Network.NONE, False)


# ── readers that misbehave on purpose ────────────────────────────────────────────────────────────────────────────────

MISBEHAVIOUR = misbehaviour(RepositoryDamaged) | {
    "reads a repository": ("os.listdir('{folder}')", Internal, "PermissionError"),
    "answers something else": ("'1'", Internal, "no reader gives"),
    "answers for two": ('\'["{{}}", "{{}}"]\'', Internal, "no reader gives"),
    "answers no manifest": ("'[\"{{}}\"]'", Internal, "no reader gives"),
    "answers another's": ("'[' + __import__('json').dumps({other!r}) + ']'", Internal, "no reader gives"),
    "answers a deep tree": ("'[\"a\",{{}},null,null,[' * 200 + ']]' * 200", Internal, "no reader gives"),
    "answers a tree of numbers": ("'[1,{{}},null,null,[]]'", Internal, "no reader gives"),
}
# What a point's text says is done, where it begins so.
ASKED = "next((one[3:] for one in look.contents if one.startswith(b'do ')), None)"


@pytest.fixture(scope="module")
def bad() -> Iterator[CagedPoints]:
    bad = CagedLooking(looker_that_does(ASKED))
    yield CagedPoints(bad)
    bad.close()


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_what_misbehaves_fails_and_the_next_point_is_read(bad: CagedPoints, tmp_path: Path, name: str) -> None:
    other = HERE.manifests([made()])[0]
    assert isinstance(other, Manifest)
    does, error, words = MISBEHAVIOUR[name]
    order = f"do {does.format(folder=tmp_path, other=other.model_dump_json())}"

    def of_a_manifest() -> object:
        return manifests.sound(bad.manifests([Unread(str(uuid4()), order.encode(), b"")])[0])

    for ask in (of_a_manifest, lambda: bad.domain_xml(order)):
        with pytest.raises(error, match=words):
            ask()
    assert isinstance(bad.manifests([made()])[0], Manifest)


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("os.abort()", RepositoryDamaged),
        ("os.kill(os.getpid(), 9)", ReaderKilled),
        ("os.kill(os.getpid(), 14)", ReaderKilled),
    ],
)
def test_one_that_breaks_its_reader_hides_no_other(bad: CagedPoints, does: str, error: type[SynvirtError]) -> None:
    """One whose reader was killed, as memory was short, or its time was over when a frozen host went on, is not damaged."""
    broken = Unread(str(uuid4()), f"do {does}".encode(), b"")
    first, second, third = bad.manifests([made(), broken, made()])
    assert (isinstance(first, Manifest), isinstance(third, Manifest)) == (True, True)
    assert isinstance(second, error)
    assert broken.point_id in second.detail


def test_one_that_takes_too_long_is_not_damaged(bad: CagedPoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """To parse it takes a processor, and has a limit of that: all else is a host that is too busy, or stood still."""
    monkeypatch.setattr(points, "WITHIN_S", -4.5)
    order = "do time.sleep(1000)"
    slow = Unread(str(uuid4()), order.encode(), b"")
    for ask in (lambda: manifests.sound(bad.manifests([slow])[0]), lambda: bad.domain_xml(order)):
        with pytest.raises(ReaderKilled, match="was not read within"):
            ask()


# ── the service reads none of it itself ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on this process reads no manifest and no XML of one."""

    def none(*_: object, **__: object) -> None:
        raise AssertionError("the service reads what a point says")

    def begin() -> None:
        for name in ("read", "read_shown"):
            monkeypatch.setattr(manifests, name, none)
        monkeypatch.setattr(xml_document, "parse", none)

    return begin


def test_points_are_taken_up_collected_and_kept_for_peers_without_reading_one(
    caged: CagedPoints, tmp_path: Path, blind: Callable[[], None]
) -> None:
    house = House(tmp_path)
    house.image("web", disk_content())
    job = house.job("web")
    [point] = house.run(job).restore_point_ids
    key = house.backups.repositories.recovery_key(job.repository_id)
    signed_by = house.backups.points.get(point).signed_by
    house.close()
    blind()
    (tmp_path / "other").mkdir()
    other = _taking_up(tmp_path, caged, key)
    assert [(one.id, one.vm_name, one.signed_by) for one in other.points.all()] == [(point, "web", signed_by)]
    repository = other.repositories.opened(other.repositories.known()[0].id)
    assert repository.manifest(point).sealed.vm_name == "web"
    assert garbage.collect(repository, now=time.time()).packs_deleted == 0
    needs = peer_needs.Needs(HostFolder(tmp_path / "repository"), reading=caged)
    for pack in repository.pack_sizes():
        with pytest.raises(BackupImmutable, match="restore points need"):
            needs.check_unneeded(pack)
    other.close()


def _taking_up(folder: Path, caged: CagedPoints, key: str) -> Backups:
    from synvirt.backups.model import BackupRepositoryRequest
    from synvirt.backups.repositories import Repositories
    from synvirt.store import Store
    from tests.fakes.backups import FakeGuests

    store = Store(f"sqlite:///{folder / 'other' / 'test.db'}")
    repositories = Repositories(
        store.backups, host="local", keyring=folder / "keyring", authors=authors_of(folder), reading=caged
    )
    made = Backups(
        store.backups,
        repositories,
        host="local",
        open_guest=FakeGuests(folder / "images").open,
        exports=folder / "exports",
    )
    made.add_repository(BackupRepositoryRequest(name="here", kind="local", path=str(folder / "repository"), recovery_key=key))
    return made


def test_what_a_peer_sends_is_read_by_a_child(caged: CagedPoints, tmp_path: Path, blind: Callable[[], None]) -> None:
    from tests.backups.test_peer_offer import OfferFolder

    folder = OfferFolder(Offer(tmp_path, keep_s=0, reading=caged))
    folder.offer.make_folders()
    blind()
    one = made()
    body = one.shown + b"\nAAAA\n"
    whole = body + blake3(body).hexdigest().encode() + b"\n"
    folder.put(f"points/{one.point_id}.point", whole)
    with pytest.raises(BackupBadRequest, match="another's name"):
        folder.put(f"points/{uuid4()}.point", whole)


def test_a_domain_of_a_point_is_rebuilt_of_what_a_child_read(
    caged: CagedPoints, blind: Callable[[], None], tmp_path: Path
) -> None:
    xml = "<domain type='kvm'><name>web</name><devices><emulator>/bin/sh</emulator></devices></domain>"
    here = foreign(xml)
    blind()
    found = foreign(xml, read=caged.domain_xml)
    assert (found.xml, found.differences) == (here.xml, here.differences)
    assert "emulator" not in found.xml
