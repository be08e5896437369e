"""Sources in the store, and the change of the key that seals them, whatever moment a crash comes at."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from pydantic import SecretStr

from synvirt import outgoing
from synvirt.errors import AuthFailed, BadRequest, Conflict, NotFound, PersistFailed
from synvirt.keyring import KeyReplaced, Keyring, KeyUnusable, Reseal
from synvirt.live.registry import BY_KIND
from synvirt.migrations.sources.registered import Sources
from synvirt.model.kinds import LiveKind
from synvirt.model.sources import Source, SourceChange, SourceRequest
from synvirt.model.values import now
from synvirt.store import Store


class Crash(BaseException):
    """The service dies here."""


def a_source(name: str = "lab") -> Source:
    return Source(id=uuid4(), name=name, kind=LiveKind.VIM_API, endpoint="https://x", created_at=now())


def started(store: Store, folder: Path, host: str = "h", allowed_hosts: tuple[str, ...] = ()) -> Sources:
    """As a service starts on this folder."""
    folder.mkdir(exist_ok=True)
    keyring = Keyring(folder / "migrator.key")
    outgoing.permit(allowed_hosts)
    return Sources(store.sources, keyring, host=host, platforms=BY_KIND, folder=folder / "sources")


def registered(sources: Sources, name: str) -> UUID:
    credentials = {"user": SecretStr("root"), "password": SecretStr(f"secret of {name}")}
    request = SourceRequest(name=name, kind=LiveKind.VIM_API, endpoint="https://x", credentials=credentials)
    return sources.add(request).id


def password(sources: Sources, store: Store, source_id: UUID) -> str:
    return sources._opened(source_id, store.sources.opened(source_id)[1])["password"]


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_source_comes_back_as_it_went_in_for_every_host(store: Store) -> None:
    source = a_source("münchen – ✓")
    store.sources.add(source, b"\x00sealed\xff", host="h")
    found, sealed = store.sources.opened(source.id)
    assert (Source.model_validate_json(source.model_dump_json()), b"\x00sealed\xff") == (found, sealed)
    assert [one.id for one in store.sources.page(limit=5)[0]] == [source.id]
    with pytest.raises(NotFound):
        store.sources.get(uuid4())
    with pytest.raises(Conflict):
        store.sources.add(a_source("münchen – ✓"), b"x", host="another")


def test_a_change_and_a_removal(store: Store) -> None:
    source = a_source()
    store.sources.add(source, b"1", host="h")
    changed = store.sources.change(
        source.id, lambda now_, sealed: (now_.model_copy(update={"name": "n"}), sealed + b"2"), host="h"
    )
    assert store.sources.opened(source.id) == (store.sources.get(source.id), b"12")
    assert changed.name == "n"
    store.sources.remove(source.id)
    with pytest.raises(NotFound):
        store.sources.remove(source.id)


def test_of_two_hosts_that_change_a_source_no_change_is_lost(store: Store, database_url: str) -> None:
    source = a_source()
    store.sources.add(source, b"", host="h")
    other, together = Store(database_url), threading.Barrier(2, timeout=60)

    def count(rows: Store, name: str) -> None:
        def counted(found: Source, sealed: bytes) -> tuple[Source, bytes]:
            more = {name: found.options.get(name, 0) + 1}
            return found.model_copy(update={"options": found.options | more}), sealed + name.encode()

        together.wait()
        for _ in range(20):
            rows.sources.change(source.id, counted, host="h")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(count, (store, other), ("a", "b")))
    found, sealed = store.sources.opened(source.id)
    assert (found.options, sorted(sealed)) == ({"a": 20, "b": 20}, sorted(b"ab" * 20))
    other.close()


def test_of_two_hosts_that_register_one_name_at_once_one_is_refused(store: Store, database_url: str) -> None:
    other, together = Store(database_url), threading.Barrier(2, timeout=60)

    def register(rows: Store, host: str) -> list[bool]:
        done = []
        for number in range(20):
            together.wait()
            try:
                rows.sources.add(a_source(f"lab-{number}"), b"", host=host)
                done.append(True)
            except Conflict:
                done.append(False)
        return done

    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(register, (store, other), ("a", "b"))
    assert [one for one, same in zip(ours, theirs, strict=True) if one == same] == []
    other.close()


# ── sealed ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_credentials_open_for_their_own_source_alone(store: Store, tmp_path: Path) -> None:
    """Somebody who can write to the store cannot have one platform's password sent to another."""
    sources = started(store, tmp_path)
    one, other = registered(sources, "one"), registered(sources, "other")
    stolen = store.sources.opened(one)[1]
    store.sources.change(other, lambda now_, _: (now_, stolen), host="h")
    with pytest.raises(Exception, match="cannot be opened"):
        password(sources, store, other)
    assert password(sources, store, one) == "secret of one"


def test_a_change_without_credentials_keeps_them(store: Store, tmp_path: Path) -> None:
    sources = started(store, tmp_path)
    id_ = registered(sources, "one")
    sources.change(id_, SourceChange(name="two"))
    assert password(sources, store, id_) == "secret of one"
    sources.change(id_, SourceChange(credentials={"user": SecretStr("u"), "password": SecretStr("new")}))
    assert password(sources, store, id_) == "new"


# ── one key for a fleet ──────────────────────────────────────────────────────────────────────────────────────────────


def test_another_host_sees_a_source_at_once_and_opens_it_once_it_has_the_key(store: Store, tmp_path: Path) -> None:
    one, other = started(store, tmp_path / "a", "a"), started(store, tmp_path / "b", "b")
    id_ = registered(one, "one")
    assert [source.name for source in other.page(limit=5, cursor=None)[0]] == ["one"]
    with pytest.raises(AuthFailed, match="key of this host") as refused:
        other.check_opens(id_)
    assert "copy keyring/migrator.key" in (refused.value.hint or "")
    # While it runs: jobs that wait for the source go on.
    (tmp_path / "b" / "migrator.key").write_bytes((tmp_path / "a" / "migrator.key").read_bytes())
    assert password(other, store, id_) == "secret of one"
    assert password(one, store, registered(other, "two")) == "secret of two"


def test_a_rotation_leaves_what_only_another_hosts_key_opens(store: Store, tmp_path: Path) -> None:
    one, other = started(store, tmp_path / "a", "a"), started(store, tmp_path / "b", "b")
    mine, theirs = registered(one, "one"), registered(other, "two")
    assert one.rotate_key() == 1
    assert password(other, store, theirs) == "secret of two"
    assert password(started(store, tmp_path / "a", "a"), store, mine) == "secret of one"
    # Given again by the host that could not open them, they are that host's.
    one.change(theirs, SourceChange(credentials={"user": SecretStr("u"), "password": SecretStr("new")}))
    assert one.rotate_key() == 2
    assert password(one, store, theirs) == "new"


def test_nothing_is_sealed_with_a_key_that_another_host_has_replaced(store: Store, tmp_path: Path) -> None:
    """It would be lost as soon as the new key is copied over that one; so would all be that another rotation seals."""
    one = started(store, tmp_path / "a", "a")
    (tmp_path / "b").mkdir()
    key, copied = (tmp_path / host / "migrator.key" for host in "ab")
    copied.write_bytes(key.read_bytes())
    copied.chmod(0o600)
    other = started(store, tmp_path / "b", "b")
    first = registered(one, "one")
    assert one.rotate_key() == 1
    for host in (other, started(store, tmp_path / "b", "b")):
        with pytest.raises(KeyReplaced, match="replaced on host a") as refused:
            registered(host, "two")
        assert "copy keyring/migrator.key from host a" in (refused.value.hint or "")
        with pytest.raises(KeyReplaced):
            host.rotate_key()
        assert not (tmp_path / "b" / "migrator.key.new").exists()
    copied.write_bytes(key.read_bytes())
    second = registered(other, "two")
    assert other.rotate_key() == 2
    with pytest.raises(KeyReplaced, match="replaced on host b"):
        registered(one, "three")
    # Where the new key is lost, this one is moved away, and the next start makes another.
    key.rename(tmp_path / "a" / "old")
    third = registered(started(store, tmp_path / "a", "a"), "three")
    assert password(started(store, tmp_path / "a", "a"), store, third) == "secret of three"
    key.write_bytes(copied.read_bytes())
    assert [password(one, store, id_) for id_ in (first, second)] == ["secret of one", "secret of two"]


def test_of_two_hosts_that_change_the_key_at_once_one_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever key is copied to the other, nothing is lost with the one that it replaces."""
    one = started(store, tmp_path / "a", "a")
    (tmp_path / "b").mkdir()
    key, copied = (tmp_path / host / "migrator.key" for host in "ab")
    copied.write_bytes(key.read_bytes())
    copied.chmod(0o600)
    other = started(store, tmp_path / "b", "b")
    ids = [registered(one, "one"), registered(other, "two")]
    reseal = store.sources.reseal

    def overtaken(*arguments: object, **named: object) -> int:
        monkeypatch.setattr(store.sources, "reseal", reseal)
        assert one.rotate_key() == 2
        return reseal(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(store.sources, "reseal", overtaken)
    with pytest.raises(KeyReplaced):
        other.rotate_key()
    assert not (tmp_path / "b" / "migrator.key.new").exists()
    copied.write_bytes(key.read_bytes())
    for host in (one, other):
        assert [password(host, store, id_) for id_ in ids] == ["secret of one", "secret of two"]


# ── the key changed ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [0, 3])
def test_after_a_rotation_only_the_new_key_opens(store: Store, tmp_path: Path, count: int) -> None:
    sources = started(store, tmp_path)
    ids = [registered(sources, f"s{number}") for number in range(count)]
    before = (tmp_path / "migrator.key").read_bytes()
    assert sources.rotate_key() == count
    assert (tmp_path / "migrator.key").read_bytes() != before
    again = started(store, tmp_path)
    assert [password(again, store, id_) for id_ in ids] == [f"secret of s{number}" for number in range(count)]
    (tmp_path / "migrator.key").write_bytes(before)
    if ids:
        with pytest.raises(Exception, match="cannot be opened"):
            password(started(store, tmp_path), store, ids[0])


@pytest.mark.parametrize("moment", ["before the commit", "after the commit"])
def test_a_crash_while_the_key_changes_costs_nothing(
    store: Store, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = started(store, tmp_path)
    ids = [registered(sources, f"s{number}") for number in range(3)]

    def crash(*_: object) -> None:
        raise Crash

    if moment == "before the commit":
        seen = 0
        real = Keyring.rotate

        def rotate(self: Keyring, store_: object, sample: object) -> int:
            def interrupted(anew: Reseal, *names: str) -> int:
                def third(sealed: bytes, belongs_to: bytes) -> bytes:
                    nonlocal seen
                    seen += 1
                    if seen == 3:
                        raise Crash
                    return anew(sealed, belongs_to)

                return store_(third, *names)  # type: ignore[operator, no-any-return]

            return real(self, interrupted, sample)  # type: ignore[arg-type]

        monkeypatch.setattr(Keyring, "rotate", rotate)
    else:
        monkeypatch.setattr(Keyring, "_take_next", crash)
    with pytest.raises(Crash):
        sources.rotate_key()
    monkeypatch.undo()
    assert (tmp_path / "migrator.key.new").exists()
    again = started(store, tmp_path)
    assert not (tmp_path / "migrator.key.new").exists()
    assert [password(again, store, id_) for id_ in ids] == [f"secret of s{number}" for number in range(3)]
    assert again.rotate_key() == 3


@pytest.mark.parametrize("error", [PersistFailed("the connection was lost"), OSError("no memory for the answer")])
def test_a_rotation_whose_commit_was_reported_as_failed_is_settled_at_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The connection was lost with the answer: the commit may have happened, and here it has."""
    sources = started(store, tmp_path)
    id_ = registered(sources, "one")
    real = store.sources.reseal

    def told_as_failed(*arguments: object, **named: object) -> int:
        real(*arguments, **named)  # type: ignore[arg-type]
        raise error

    monkeypatch.setattr(store.sources, "reseal", told_as_failed)
    with pytest.raises(type(error)):
        sources.rotate_key()
    assert not (tmp_path / "migrator.key.new").exists()
    assert password(sources, store, id_) == "secret of one"


@pytest.mark.parametrize("committed", [True, False])
def test_nothing_is_sealed_with_a_key_that_may_be_the_old_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """The store goes away during a change, and nobody knows whether it was committed until it is back."""
    sources = started(store, tmp_path)
    ids = [registered(sources, "one")]
    reseal, sealed = store.sources.reseal, store.sources.sealed
    away = False

    def goes_away(*arguments: object, **named: object) -> int:
        nonlocal away
        if committed:
            reseal(*arguments, **named)  # type: ignore[arg-type]
        away = True
        raise PersistFailed("the connection was lost")

    def sealed_or_away() -> object:
        if away:
            raise PersistFailed("the store is away")
        return sealed()

    monkeypatch.setattr(store.sources, "reseal", goes_away)
    monkeypatch.setattr(store.sources, "sealed", sealed_or_away)
    with pytest.raises(PersistFailed):
        sources.rotate_key()
    with pytest.raises(PersistFailed):
        registered(sources, "too early")
    away = False
    ids.append(registered(sources, "two"))
    monkeypatch.undo()
    for known in (sources, started(store, tmp_path)):
        assert [password(known, store, id_) for id_ in ids] == ["secret of one", "secret of two"]
        assert known.rotate_key() == 2


def test_a_store_that_no_key_opens_starts_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = started(store, tmp_path)
    registered(sources, "one")
    for name in ("migrator.key", "migrator.key.new"):
        (tmp_path / name).unlink(missing_ok=True)
        Keyring(tmp_path / name)
    with pytest.raises(KeyUnusable, match="neither"):
        started(store, tmp_path)


# ── where a source may be ────────────────────────────────────────────────────────────────────────────────────────────


def asked(kind: LiveKind, endpoint: str) -> SourceRequest:
    secrets = {"user": SecretStr("root"), "password": SecretStr("x")} if kind == LiveKind.VIM_API else {}
    return SourceRequest(name="s", kind=kind, endpoint=endpoint, credentials=secrets)


@pytest.mark.parametrize("endpoint", ["https://169.254.169.254", "https://[fe80::1]", "https://[::ffff:100.100.100.200]"])
def test_no_source_is_where_metadata_are(store: Store, tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(BadRequest, match="source or a backup peer"):
        started(store, tmp_path / "k").add(asked(LiveKind.VIM_API, endpoint))


def test_a_source_that_may_no_longer_be_spoken_to_is_not(store: Store, tmp_path: Path) -> None:
    """The setting came after it; and a name is asked for again each time, since it may lead elsewhere by now."""
    source = started(store, tmp_path / "k").add(asked(LiveKind.VIM_API, "https://localhost:1"))

    async def opened(allowed: str) -> None:
        sources = started(store, tmp_path / "k", allowed_hosts=(allowed,))
        await (await sources.connect(LiveKind.VIM_API, source.id)).close()

    for allowed in ("*.example", "10.0.0.0/8"):
        closed = started(store, tmp_path / "k", allowed_hosts=(allowed,))
        asks: list[Callable[[], object]] = [
            partial(asyncio.run, opened(allowed)),
            partial(asyncio.run, closed.test(source.id)),
            partial(asyncio.run, closed.record(source.id)),
            partial(closed.certificate, source.id),
        ]
        for ask in asks:
            with pytest.raises(BadRequest, match="source or a backup peer"):
                ask()
    asyncio.run(opened("localhost"))


def test_what_is_not_reached_over_the_network_needs_no_leave(store: Store, tmp_path: Path) -> None:
    local = started(store, tmp_path / "k", allowed_hosts=("10.0.0.0/8",)).add(asked(LiveKind.LIBVIRT_REMOTE, "qemu:///system"))
    assert local.endpoint == "qemu:///system"
