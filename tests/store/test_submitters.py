"""Who submitted a document: the version before reads what is stored, and we read its documents; answers have the whole."""

import json
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from sqlalchemy import select

from synvirt.backups.model import BackupRun
from synvirt.fleet.model import Wave
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.rehearsal import Rehearsal
from synvirt.model.submitter import Submitter
from synvirt.store import Store
from synvirt.store.documents import VERSION, as_answered, parsed, rewritten, written
from synvirt.store.tables import events, migrations
from tests.jobs.migrations import migration

WHO = Submitter(account="oidc:Joe", role="operator", address="192.0.2.7")
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DOCUMENTS = [
    migration(submitted_by=WHO, created_at=AT),
    BackupRun(id=uuid4(), submitted_by=WHO, created_at=AT),
    Rehearsal(id=uuid4(), migration_id=uuid4(), submitted_by=WHO, created_at=AT),
    Wave(id=uuid4(), name="night", submitted_by=WHO, created_at=AT),
]


# As the version before has them.
class MigrationBefore(Migration):
    submitted_by: str | None = None  # type: ignore[assignment]


class BackupRunBefore(BackupRun):
    submitted_by: str | None = None  # type: ignore[assignment]


class RehearsalBefore(Rehearsal):
    submitted_by: str | None = None  # type: ignore[assignment]


class WaveBefore(Wave):
    submitted_by: str | None = None  # type: ignore[assignment]


BEFORE: dict[type[BaseModel], type[BaseModel]] = {
    Migration: MigrationBefore,
    BackupRun: BackupRunBefore,
    Rehearsal: RehearsalBefore,
    Wave: WaveBefore,
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda one: type(one).__name__)
def test_the_version_before_reads_ours_and_loses_nothing_of_it(document: BaseModel) -> None:
    ours, before = written(document), BEFORE[type(document)]
    read = parsed(before, ours)
    assert read.model_dump()["submitted_by"] == "oidc:Joe"
    assert written(read) == read.model_dump_json(), "as that version writes a document"
    for changed in (read, read.model_copy(update={"finished_at": AT})):
        theirs = rewritten(ours, read, changed)
        back = parsed(type(document), theirs).model_dump()
        assert back["submitted_by"] == WHO.model_dump()
        assert json.loads(as_answered(theirs))["submitted_by"] == WHO.model_dump()


def _as_the_version_before_wrote_it(ours: str) -> str:
    """It put what it did not know before the rest."""
    document = json.loads(ours)
    return json.dumps({"submitter": document.pop("submitter"), **document}, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda one: type(one).__name__)
def test_a_text_of_the_version_before_is_the_account(document: BaseModel) -> None:
    account = Submitter(account="Joe")
    theirs = json.dumps(json.loads(document.model_dump_json()) | {"submitted_by": "Joe"})
    found = parsed(type(document), theirs)
    assert found == document.model_copy(update={"submitted_by": account})
    answered = as_answered(json.dumps(json.loads(theirs), separators=(",", ":")))
    assert json.loads(answered)["submitted_by"] == {"account": "Joe", "role": None, "address": None}
    assert parsed(type(document), answered) == found, "as another of this version reads the answer"
    assert "submitter" not in json.loads(written(found)), "there is no more to it"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda one: type(one).__name__)
def test_the_service_itself_is_nobody(document: BaseModel) -> None:
    itself = document.model_copy(update={"submitted_by": None})
    assert written(itself) == as_answered(written(itself)) == itself.model_dump_json()
    assert parsed(type(document), written(itself)) == itself


ODD = ('"', "\\", '"submitter":{', '{"submitted_by":"x"}', "}", "\\u007d", ',"submitter":{},', "ä", "\N{REPLACEMENT CHARACTER}")
ODD_TEXTS = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.sampled_from(ODD)).map("".join))


@given(account=ODD_TEXTS, role=ODD_TEXTS, address=ODD_TEXTS, name=ODD_TEXTS)
def test_an_answer_is_the_document_whatever_the_names_are(account: str, role: str, address: str, name: str) -> None:
    who = Submitter(account=account, role=role, address=address)
    job = migration(name=name, submitted_by=who, created_at=AT)
    ours = written(job)
    assert as_answered(ours) == job.model_dump_json()
    assert parsed(Migration, ours) == job
    assert json.loads(ours)["submitted_by"] == account
    theirs = as_answered(_as_the_version_before_wrote_it(ours))
    assert json.loads(theirs) == json.loads(job.model_dump_json())
    assert theirs.startswith('{"id":"'), "lists find running jobs by it"


def test_a_store_keeps_it_through_changes_and_in_its_events(database_url: str) -> None:
    store = Store(database_url)
    job = migration(submitted_by=WHO)
    store.add(job, host="h")
    store.change(job.id, State.QUEUED, lambda one: one.model_copy(update={"state": State.COPYING_FULL}))
    assert store.get(job.id).submitted_by == WHO
    with store._reading() as db:
        stored = [
            *db.execute(select(migrations.c.document, migrations.c.version)).all(),
            *db.execute(select(events.c.document, events.c.version)).all(),
        ]
    assert [(json.loads(row.document)["submitted_by"], row.version) for row in stored] == [("oidc:Joe", VERSION)] * 3
    store.close()


def test_what_a_later_version_adds_to_it_survives() -> None:
    job = migration(submitted_by=WHO, created_at=AT)
    later = json.loads(written(job))
    later["submitter"]["via"] = "proxy"
    text = json.dumps(later, separators=(",", ":"))
    read = parsed(Migration, text)
    after = rewritten(text, read, read.model_copy(update={"retry_of": UUID(int=1)}))
    assert read == job
    assert json.loads(after)["submitter"] == WHO.model_dump() | {"via": "proxy"}


@pytest.mark.parametrize(
    ("who", "words"),
    [
        (WHO, "oidc:Joe (operator, 192.0.2.7)"),
        (Submitter(account="local", role="admin", address=""), "local (admin)"),
        (Submitter(account="Joe"), "Joe"),
    ],
)
def test_it_is_shown_in_words(who: Submitter, words: str) -> None:
    assert str(who) == words
