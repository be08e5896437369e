"""The tables, as SQLAlchemy Core. Alembic versions next to this file make them; a test compares the two.

migrations ──< events        a row for each move, with the job as it was then: SSE replays them
           ──< watermarks    how far the destination has flushed, for each disk and pass
           ──< secrets       the sealed credentials of a job that reads a remote file
           ──< memory        what a job remembers besides its document (snapshots, change ids), in typed rows
           ──< rehearsals    the starts of its guest from clones; the oldest are swept
ledger                       what a job, a run or a test makes, written before it is made
hosts                        each host's lease and epoch: it writes under these
slots                        which jobs read a source's host or write a destination, and which wait
uploads                      the archives that were uploaded whole; their bytes are files of their host
sources                      the registered platforms of all hosts, each with its credentials, sealed
schema_facts                 which versions of the service may use these tables, and which sealing keys were replaced
backups                      repositories, jobs, runs and restore points; the point itself is in its repository
backup_events                a row for each move of a run, with the run as it was then; the oldest are swept
waves ──< wave_members       a wave, and a row for each member, as one of thousands changes at a time
      ──< wave_events        what happened to a wave and its members; the oldest are swept
      ──< wave_hooks         the secrets of its webhooks, sealed
      ──< wave_deliveries    what is to be sent to them, and the result
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Computed,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

# Named so that Alembic can drop a constraint on every database.
METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite gives a rowid only to INTEGER; PostgreSQL's integer ends at 2^31, which an events table can reach.
_SERIAL = BigInteger().with_variant(Integer(), "sqlite")
_ID = String(36)
# Columns that only find rows keep this many characters of a text.
CHARS_KEPT = 255


def _job() -> Column[str]:
    return Column("migration_id", _ID, ForeignKey("migrations.id", ondelete="CASCADE"), nullable=False)


def _version() -> Column[str]:
    """The version of the row's document (documents.py). The default is for rows of services that did not know versions."""
    return Column("version", String(16), nullable=False, server_default="1.0")


# Written out, as a database takes a partial index only for a query with the same words.
UNENDED = "state NOT IN ('Cancelled', 'Completed', 'Failed')"
# `document` is the Migration as the API answers it, so that a list of thousands needs no parsing. The other columns are for
# queries, and flags that are set by others than the job's own engine. `name` and `source_id` (of none: an empty text) only find
# rows; they are NULL where an earlier version wrote the row.
migrations = Table(
    "migrations",
    METADATA,
    Column("number", _SERIAL, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("host", String(255), nullable=False),
    Column("state", String(32), nullable=False),
    Column("cancel_requested", Boolean, nullable=False, server_default=false()),
    Column("cutover_requested", Boolean, nullable=False, server_default=false()),
    # Seconds since 1970: when a requested cut-over that has not begun expires. NULL: it does not expire.
    Column("cutover_until", Double),
    Column("document", Text, nullable=False),
    _version(),
    Column("name", String(CHARS_KEPT)),
    Column("source_id", _ID),
    # Each with the number: a page is found in its order, and ends after its rows.
    Index("ix_migrations_host_state", "host", "state", "number"),
    Index("ix_migrations_host", "host", "number"),
    Index("ix_migrations_state", "state", "number"),
    Index("ix_migrations_name", "name", "number"),
    Index("ix_migrations_source_id", "source_id", "number"),
    Index("ix_migrations_source_id_state", "source_id", "state", "number"),
    # With the state, which says nothing new there: SQLite takes it for enough only so. It is as partial on PostgreSQL, by its
    # revision: SQLAlchemy would load that dialect for a word of it here, 36 ms of each start.
    Index("ix_migrations_unended", "host", "number", "state", sqlite_where=text(UNENDED)),
    sqlite_autoincrement=True,
)

# sqlite_autoincrement: without it SQLite would use the id of a deleted last row again, and a client's Last-Event-ID would be
# wrong.
events = Table(
    "events",
    METADATA,
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
    _job(),
    Column("document", Text, nullable=False),
    _version(),
    Index("ix_events_migration_id", "migration_id"),
    sqlite_autoincrement=True,
)

watermarks = Table(
    "watermarks",
    METADATA,
    Column("migration_id", _ID, ForeignKey("migrations.id", ondelete="CASCADE"), primary_key=True),
    Column("pass_number", Integer, primary_key=True),
    Column("disk_key", Text, primary_key=True),
    Column("offset_bytes", BigInteger, nullable=False),
    Column("bytes_total", BigInteger, nullable=False),
    Column("bytes_done", BigInteger, nullable=False),
    Column("bytes_zero", BigInteger, nullable=False),
    Column("finished", Boolean, nullable=False),
)

# The kinds of entries that a completed job must still settle at its source. The others are things here, which it keeps: some
# eight for each job of years. A partial index, as above.
OWED_KINDS = ("mark", "snapshot", "tracking")
IS_OWED = f"kind IN {OWED_KINDS}"
# `host`: the host that made it; NULL where it is the owner's host, which may change. `name` may be long: a path, or a domain's
# XML.
ledger = Table(
    "ledger",
    METADATA,
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
    Column("owner_kind", String(16), nullable=False),
    Column("owner_id", _ID, nullable=False),
    Column("host", String(255)),
    Column("kind", String(32), nullable=False),
    Column("name", Text, nullable=False),
    Column("state", String(16), nullable=False, server_default=""),
    Column("document", Text),
    _version(),
    Index("ix_ledger_owner_id", "owner_id", "owner_kind"),
    Index("ix_ledger_owner_kind", "owner_kind", "host"),
    # With the columns of the query, as above.
    Index("ix_ledger_owed", "owner_id", "owner_kind", "kind", sqlite_where=text(IS_OWED)),
    sqlite_autoincrement=True,
)

# `kind` and `number` identify a row of a job. The kind of job defines its document.
memory = Table(
    "memory",
    METADATA,
    Column("migration_id", _ID, ForeignKey("migrations.id", ondelete="CASCADE"), primary_key=True),
    Column("kind", String(32), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("document", Text, nullable=False),
    _version(),
)

# Sealed credentials of a job that reads a remote file. They are deleted when the job ends.
secrets = Table(
    "secrets",
    METADATA,
    Column("migration_id", _ID, ForeignKey("migrations.id", ondelete="CASCADE"), primary_key=True),
    Column("host", String(255), nullable=False),
    Column("sealed", LargeBinary, nullable=False),
)

# `document` is the Rehearsal as the API answers it. The host that has the job runs it.
rehearsals = Table(
    "rehearsals",
    METADATA,
    Column("number", _SERIAL, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    _job(),
    Column("state", String(32), nullable=False),
    Column("cancel_requested", Boolean, nullable=False, server_default=false()),
    Column("document", Text, nullable=False),
    _version(),
    Index("ix_rehearsals_migration_id", "migration_id"),
    sqlite_autoincrement=True,
)

# Times in seconds since 1970, of the database's clock. `document`: how the host describes itself.
hosts = Table(
    "hosts",
    METADATA,
    Column("id", String(255), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("until", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("fenced", String(16), nullable=False),
    Column("document", Text, nullable=False),
)

# `resource`: a host of a source, or a destination; `number`: the place in its line. Held, or waiting.
slots = Table(
    "slots",
    METADATA,
    Column("number", _SERIAL, primary_key=True, autoincrement=True),
    Column("resource", Text, nullable=False),
    Column("job_id", _ID, nullable=False),
    Column("host", String(255), nullable=False),
    Column("held", Boolean, nullable=False),
    UniqueConstraint("job_id", "resource"),
    Index("ix_slots_resource", "resource"),
    sqlite_autoincrement=True,
)

# `usable_from`: the first revision whose service can work with these tables (upgrading.py). `sealing_key_replaced NAME`: by
# which sealing key that one was replaced, and on which host (sources.py).
schema_facts = Table(
    "schema_facts",
    METADATA,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

# `document` is the Upload as the API answers it. An upload that is not whole yet has no row.
uploads = Table(
    "uploads",
    METADATA,
    Column("number", _SERIAL, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("host", String(255), nullable=False),
    Column("document", Text, nullable=False),
    _version(),
    sqlite_autoincrement=True,
)

# `document` is the Source as the API answers it. `sealed` opens with the key of `host`, which hosts of a fleet share.
sources = Table(
    "sources",
    METADATA,
    Column("number", _SERIAL, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("host", String(255), nullable=False),
    Column("name", String(255), nullable=False),
    Column("document", Text, nullable=False),
    _version(),
    Column("sealed", LargeBinary, nullable=False),
    UniqueConstraint("host", "name"),
    sqlite_autoincrement=True,
)

# `document` is the Window.
windows = Table(
    "windows",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("document", Text, nullable=False),
    _version(),
)

# `document` is the thing as the API answers it; `kind` is repository, job, run or point, `state` what queries ask by. The
# columns after the version only find runs and points; they are NULL where an earlier version wrote the row. `made_at`, of a
# point: in seconds since 1970. `point_state` is computed, as an earlier version changes a point's state in its document alone.
POINT_STATES = ("ok", "unverified", "damaged")
_OF_STATES = " ".join(f"""WHEN replace(document, '"state":"{one}"', '') <> document THEN '{one}'""" for one in POINT_STATES)
backups = Table(
    "backups",
    METADATA,
    Column("number", _SERIAL, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("host", String(255), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("state", String(32), nullable=False),
    Column("document", Text, nullable=False),
    _version(),
    Column("job_id", _ID),
    Column("repository_id", _ID),
    Column("vm_id", String(CHARS_KEPT)),
    Column("vm_name", String(CHARS_KEPT)),
    Column("run_kind", String(32)),
    Column("point_state", String(32), Computed(f"CASE WHEN kind = 'point' THEN CASE {_OF_STATES} END END")),
    Column("made_at", Double),
    Index("ix_backups_host_kind", "host", "kind", "number"),
    *(
        Index(f"ix_backups_{name}", "host", "kind", name, "number")
        for name in ("state", "job_id", "repository_id", "vm_id", "vm_name", "run_kind", "point_state")
    ),
    Index("ix_backups_newest", "host", "kind", "point_state", "job_id", "vm_id", "made_at"),
    sqlite_autoincrement=True,
)

# `document` is the Token as the API answers it. The secret itself is not stored.
tokens = Table(
    "tokens",
    METADATA,
    Column("number", _SERIAL, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("secret_sha256", String(64), nullable=False, unique=True),
    Column("document", Text, nullable=False),
    _version(),
    sqlite_autoincrement=True,
)

# Rows are only added. Each row's digest covers the row and the digest before it.
audit = Table(
    "audit",
    METADATA,
    Column("seq", _SERIAL, primary_key=True, autoincrement=True),
    Column("digest", String(64), nullable=False),
    Column("document", Text, nullable=False),
    sqlite_autoincrement=True,
)

backup_events = Table(
    "backup_events",
    METADATA,
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
    Column("host", String(255), nullable=False),
    Column("run_id", _ID, nullable=False),
    Column("document", Text, nullable=False),
    _version(),
    Index("ix_backup_events_run_id", "run_id"),
    sqlite_autoincrement=True,
)

# `document` is the Wave as the API answers it, without its members.
waves = Table(
    "waves",
    METADATA,
    Column("number", _SERIAL, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("name", String(255), nullable=False),
    Column("state", String(32), nullable=False),
    Column("document", Text, nullable=False),
    # Seconds since 1970, of the database's clock: until when the wave's bandwidth is given to some of its copies.
    Column("rate_taken_until", Double, nullable=False, server_default="0"),
    _version(),
    sqlite_autoincrement=True,
)


def _wave() -> ForeignKey:
    return ForeignKey("waves.id", ondelete="CASCADE")


# `document` is the Member as the API answers it, without `waits_for`, which changes most often. `job_id` is written before the
# job is submitted, `submitted` afterwards. `rolling_back`: its source is to be powered on again.
wave_members = Table(
    "wave_members",
    METADATA,
    Column("wave_id", _ID, _wave(), primary_key=True),
    Column("member_id", String(64), primary_key=True),
    Column("position", Integer, nullable=False),
    Column("state", String(32), nullable=False),
    Column("job_id", _ID),
    Column("submitted", Boolean, nullable=False, server_default=false()),
    Column("rolling_back", Boolean, nullable=False, server_default=false()),
    Column("waits_for", Text),
    Column("document", Text, nullable=False),
    _version(),
    Index("ix_wave_members_wave_id", "wave_id", "position"),
    Index("ix_wave_members_job_id", "job_id"),
    # All that is asked of the members of waves that have ended, each moment: no document is read for it.
    Index("ix_wave_members_state", "wave_id", "state", "rolling_back"),
)

wave_events = Table(
    "wave_events",
    METADATA,
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
    Column("wave_id", _ID, _wave(), nullable=False),
    Column("document", Text, nullable=False),
    _version(),
    Index("ix_wave_events_wave_id", "wave_id"),
    sqlite_autoincrement=True,
)

wave_hooks = Table(
    "wave_hooks",
    METADATA,
    Column("id", _ID, primary_key=True),
    Column("wave_id", _ID, _wave(), nullable=False),
    Column("host", String(255), nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Index("ix_wave_hooks_wave_id", "wave_id"),
)

# Times in seconds since 1970, of the clock of the host that wrote them.
wave_deliveries = Table(
    "wave_deliveries",
    METADATA,
    Column("number", _SERIAL, primary_key=True, autoincrement=True),
    Column("wave_id", _ID, _wave(), nullable=False),
    Column("hook_id", _ID, nullable=False),
    Column("event", String(32), nullable=False),
    Column("body", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("made_at", Double, nullable=False),
    Column("next_at", Double, nullable=False),
    Column("answer", Text),
    Index("ix_wave_deliveries_wave_id", "wave_id", "number"),
    Index("ix_wave_deliveries_state", "state", "next_at"),
    sqlite_autoincrement=True,
)
