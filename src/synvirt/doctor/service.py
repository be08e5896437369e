"""Whether the service has its folder, key and store, and what confines its readers."""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote
from uuid import UUID

from synvirt.accounts import listed
from synvirt.cage import layers
from synvirt.doctor.finding import Missing
from synvirt.errors import BadRequest, SynvirtError
from synvirt.keyring import KEY_BYTES, opens
from synvirt.nearest import in_short
from synvirt.settings import Settings
from synvirt.settings.starting import check_authorities
from synvirt.sizes import MIB, counted, sized

if TYPE_CHECKING:
    from sqlalchemy import Connection as Database
    from sqlalchemy import Table

    from synvirt.model.values import Model

# The store's log alone may need as much for a moment.
FREE_LEAST_BYTES = 16 * MIB
# Specification part 8.
IMPORT_ROOT_MODE, KEY_MODE = 0o750, 0o600
# The version, by a question that cannot be answered without reading the store.
_VERSIONS = {"sqlite": "SELECT sqlite_version(), count(*) FROM sqlite_master", "postgresql": "SHOW server_version"}


def data_dir(settings: Settings) -> str:
    """The data folder and its free space. Missing where it cannot be written, or is full."""
    folder = settings.data_dir
    # Where it is to be made, the folder above it decides.
    present = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        raise Missing(f"{present} cannot be written: {error.strerror}") from error
    free = shutil.disk_usage(present).free
    if free < FREE_LEAST_BYTES:
        raise Missing(f"the file system of {folder} is full, {sized(free)} free: jobs wait until there is space")
    return f"{folder}: {sized(free)} free"


def temporary_files(_: Settings) -> str:
    """The folder for temporary files. Missing where none can be written, or it is full."""
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(b"x")
    except OSError as error:
        raise Missing(f"a temporary file cannot be made: {error.strerror}") from error
    return tempfile.gettempdir()


def import_root(settings: Settings) -> str:
    return _ours(settings.imports_dir, IMPORT_ROOT_MODE)


def sealing_key(settings: Settings) -> str:
    """The sealing key's file and mode. Missing where it is no key, or open to others."""
    path = settings.keyring_dir / "migrator.key"
    found = _ours(path, KEY_MODE)
    if path.exists() and path.stat().st_size != KEY_BYTES:
        raise Missing(f"{path} has {path.stat().st_size} bytes, not {KEY_BYTES}: it is not a key")
    return found


def users_file(settings: Settings) -> str:
    """The accounts of the users file. Missing where nobody can log in."""
    path = settings.keyring_dir / "users"
    if not path.exists():
        return f"{path}: made at the first start"
    there = listed(path)
    if not there:
        raise Missing(f"{path} has no account: nobody can log in")
    return f"{path}: {counted(len(there), 'account')}"


def authorities(settings: Settings) -> str:
    """The file of the setting remote_ca_file. Missing where it cannot be used."""
    if settings.remote_ca_file is None:
        return "the setting remote_ca_file names none"
    try:
        check_authorities(settings)
    except BadRequest as error:
        raise Missing(error.detail) from error
    except PermissionError as error:
        raise Missing(f"{settings.remote_ca_file} cannot be read: {error.strerror}") from error
    return str(settings.remote_ca_file)


def _ours(path: Path, mode: int) -> str:
    """They belong to the service's user, and no other user can read or write them; what the first start will make may be
    missing. root, who asks, need not be that user: then it is who owns the folder."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return f"{path}: made at the first start"
    except OSError as error:
        raise Missing(f"{path} cannot be inspected: {error.strerror}") from error
    service = path.parent.stat().st_uid if os.geteuid() == 0 else os.geteuid()
    if found.st_uid != service:
        raise Missing(f"{path} belongs to the user number {found.st_uid}, not to {service}")
    if stat.S_IMODE(found.st_mode) & ~mode:
        raise Missing(f"{path} has the mode {stat.S_IMODE(found.st_mode):04o}, which is wider than {mode:04o}")
    return f"{path}: {stat.S_IMODE(found.st_mode):04o}"


@contextlib.contextmanager
def _opened(settings: Settings) -> Iterator["Database | None"]:
    """The store, to be looked at only: the service makes it, and brings an old one up to date. None: it is made at the first
    start. Missing."""
    import sqlalchemy

    from synvirt.store.opening import opened

    url = sqlalchemy.make_url(settings.store_url)
    if url.get_backend_name() == "sqlite":
        path = Path(str(url.database))
        if not path.exists():
            yield None
            return
        url = url.set(database=f"file:{quote(str(path))}", query={"mode": "ro", "uri": "true"})
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    else:  # with the service's own limits: a server that hangs is waited for as long as they say
        engine = opened(settings.store_url)
    try:
        with engine.connect() as connection:
            yield connection
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise Missing(f"the store cannot be opened: {str(getattr(error, 'orig', error)).splitlines()[0]}") from error
    finally:
        engine.dispose()


def store(settings: Settings) -> str:
    """The store's product and version. Missing where it cannot be read, or has documents that cannot be."""
    import sqlalchemy

    with _opened(settings) as connection:
        if connection is None:
            return f"{sqlalchemy.make_url(settings.store_url).database}: made at the first start"
        product = connection.dialect.name
        version = str(connection.scalar(sqlalchemy.text(_VERSIONS[product])))
        bad = _quarantined(connection)
    if bad:
        raise Missing(f"stored documents that this version cannot read, and leaves alone: {in_short(bad, between='; ')}")
    return f"{product} {version}"


class _Sealed(NamedTuple):
    """Something that the sealing key has sealed. `owner`: what it is bound to, as `migrations.secrets.belongs_to` has it."""

    owner: str
    id: str
    name: str
    sealed: bytes


def credentials(settings: Settings) -> str:
    """Whether this host's sealing key opens what is sealed: the credentials of sources and of this host's jobs, and the
    secrets of waves' webhooks. Missing, with what it does not open: another host of the fleet sealed it with another key."""
    from synvirt.migrations.secrets import belongs_to

    path = settings.keyring_dir / "migrator.key"
    with _opened(settings) as connection:
        found = [] if connection is None else _sealed(connection, settings.host_id)
    if not found:
        return "no source is registered"
    try:
        key = path.read_bytes()
    except OSError as error:
        raise Missing(f"{path} cannot be read: {error.strerror}") from error
    shut = [one for one in found if not opens(key, one.sealed, belongs_to(one.owner, UUID(one.id)))]
    if shut:
        names = [one.name if one.owner == "source" else f"{_SEALED[one.owner]} {one.name}" for one in shut]
        raise Missing(f"the key of this host does not open the credentials of {in_short(names)}")
    counts = {noun: sum(one.owner == owner for one in found) for owner, noun in _SEALED.items()}
    return f"the key opens those of {', '.join(counted(count, noun) for noun, count in counts.items() if count)}"


# What has sealed secrets, by the owner that they are bound to.
_SEALED = {"source": "source", "job": "job", "hook": "webhook"}


def _sealed(connection: "Database", host: str) -> list[_Sealed]:
    """All that is sealed, as far as this host may have to open it: another host's job is not its own."""
    import sqlalchemy

    from synvirt.store.tables import migrations, secrets, sources, wave_hooks, waves

    jobs = secrets.join(migrations, migrations.c.id == secrets.c.migration_id)
    queries = {
        "source": sqlalchemy.select(sources.c.id, sources.c.name, sources.c.sealed).order_by(sources.c.number),
        "job": sqlalchemy.select(migrations.c.id, migrations.c.id, secrets.c.sealed)
        .select_from(jobs)
        .where(migrations.c.host == host)
        .order_by(migrations.c.number),
        "hook": sqlalchemy.select(wave_hooks.c.id, "of wave " + waves.c.name, wave_hooks.c.sealed)
        .select_from(wave_hooks.join(waves))
        .order_by(waves.c.number, wave_hooks.c.id),
    }
    # A store that no service of this version has opened yet may lack tables.
    there = set(sqlalchemy.inspect(connection).get_table_names())
    return [
        _Sealed(owner, *row)
        for (owner, query), table in zip(queries.items(), (sources, secrets, wave_hooks), strict=True)
        if table.name in there
        for row in connection.execute(query)
    ]


class _Documents(NamedTuple):
    """A table of stored documents. `models`: by kind, those that are read; of other kinds, which are many, only versions are.
    `ends`: the states whose documents are left out. `named_by`: the columns that name a document."""

    table: "Table"
    models: "dict[str, type[Model]]"
    ends: Collection[object] = ()
    named_by: tuple[str, ...] = ("id",)


def _documents() -> list[_Documents]:
    """All tables of documents. Of jobs, rehearsals and members of waves only those that have not ended are looked at."""
    from synvirt.backups.model import BackupJob, BackupRepository
    from synvirt.fleet.model import MEMBER_ENDS, Member, Wave
    from synvirt.model.files import Upload
    from synvirt.model.job import Migration
    from synvirt.model.kinds import ENDS
    from synvirt.model.rehearsal import REHEARSED, Rehearsal
    from synvirt.model.sources import Source
    from synvirt.store import tables
    from synvirt.store.access import Token

    return [
        _Documents(tables.migrations, {"migration": Migration}, ENDS),
        _Documents(tables.sources, {"source": Source}),
        _Documents(tables.uploads, {"upload": Upload}),
        _Documents(tables.backups, {"job": BackupJob, "repository": BackupRepository}),
        _Documents(tables.tokens, {"token": Token}),
        _Documents(tables.memory, {}, named_by=("migration_id",)),
        _Documents(tables.ledger, {}),
        _Documents(tables.rehearsals, {"rehearsal": Rehearsal}, REHEARSED),
        _Documents(tables.waves, {"wave": Wave}),
        _Documents(tables.wave_members, {"wave_member": Member}, MEMBER_ENDS, ("wave_id", "member_id")),
    ]


def _quarantined(connection: "Database") -> list[str]:
    """Each stored document that this version cannot read, with its cause."""
    import sqlalchemy

    from synvirt.store.documents import VERSION, check_version, parsed

    looked_at = sqlalchemy.inspect(connection)
    found = []
    for table, models, ends, named_by in _documents():
        if not looked_at.has_table(table.name):
            continue
        # A store that no service of this version has opened yet may lack columns.
        there = {column["name"] for column in looked_at.get_columns(table.name)}
        query = sqlalchemy.select(*(column for column in table.c if column.name in there)).order_by(*table.primary_key)
        if ends:
            query = query.where(table.c.state.not_in([str(end) for end in ends]))
        for row in connection.execute(query):
            kind = row.kind if table.name == "backups" else table.name.removesuffix("s")
            version = getattr(row, "version", VERSION)
            try:
                check_version(kind, version)
                if kind in models:
                    parsed(models[kind], row.document, version)
            except SynvirtError as error:
                name = " ".join(str(getattr(row, column)) for column in named_by)
                found.append(f"{kind.replace('_', ' ')} {name}: {error.detail}")
    return found


def cage_layer(name: str) -> Callable[[Settings], str]:
    """A check for one layer of the cage."""

    def look(_: Settings) -> str:
        if not layers()[name]:
            raise Missing("this host does not give it to the service")
        return "holds"

    return look
