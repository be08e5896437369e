"""Imports of sheets, and waves of a query, beside sources that do not answer."""

import asyncio
from datetime import datetime
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.errors import Conflict, SourceUnreachable
from synvirt.fleet.querying import VmQuery
from synvirt.fleet.sheets import importing
from synvirt.fleet.sheets.importing import Importer
from synvirt.fleet.sheets.rows import to_csv
from synvirt.fleet.waves import Waves
from synvirt.migrations.sources.registered import Inventory
from synvirt.model.kinds import LiveKind
from synvirt.model.sources import Source
from synvirt.model.values import now
from synvirt.model.windows import Window
from synvirt.store import Store
from tests.fleet.made import member, wave

SILENT = Source(
    id=UUID(int=1), name="silent", kind=LiveKind.LIBVIRT_REMOTE, endpoint="qemu:///system", options={}, created_at=now()
)
SHEET = to_csv(wave(member("a")))


@pytest.fixture
def waves(tmp_path: Path) -> Waves:
    return Waves(Store(f"sqlite:///{tmp_path / 'store.db'}").waves)


def test_an_import_waits_for_no_source_of_another(waves: Waves) -> None:
    async def run() -> None:
        asked, answer = asyncio.Event(), asyncio.Event()

        async def inventory(_: UUID) -> Inventory:
            asked.set()
            await answer.wait()
            raise SourceUnreachable("it is away")

        known = iter([[SILENT], []])
        importer = Importer(waves, lambda: next(known), inventory)
        first = asyncio.create_task(importer.take(SHEET, name=None, into=None, dry_run=True))
        await asked.wait()
        async with asyncio.timeout(60):
            assert (await importer.take(SHEET, name=None, into=None, dry_run=True)).waves[0].members == 1
        answer.set()
        # A sheet whose rows have plans of their own needs no source.
        assert (await first).problems == ()

    asyncio.run(run())


def test_a_draft_that_is_changed_while_its_sheet_is_read_stays_as_it_was_changed(waves: Waves) -> None:
    """The sources are asked for up to a minute; what the import keeps of the draft is from before."""
    draft = waves.create(wave(member("old")))
    start, end = datetime.fromisoformat("2030-01-01"), datetime.fromisoformat("2030-01-02")
    changed = wave(member("old"), windows=[Window(id="sat", name="Saturday", start=start, end=end)])

    async def inventory(_: UUID) -> Inventory:
        waves.replace(draft.id, changed)
        return Inventory(SILENT, "i", warm=False, vms=())

    importer = Importer(waves, lambda: [SILENT], inventory)
    with pytest.raises(Conflict, match="wave night was changed meanwhile"):
        asyncio.run(importer.take(SHEET, name=None, into=draft.id, dry_run=False))
    found = waves.whole(draft.id)
    assert ([one.id for one in found.members], [one.id for one in found.windows]) == (["old"], ["sat"])
    importer = Importer(waves, list, inventory)
    asyncio.run(importer.take(SHEET, name=None, into=draft.id, dry_run=False))
    found = waves.whole(draft.id)
    assert ([one.id for one in found.members], [one.id for one in found.windows]) == (["a"], ["sat"])


def test_a_query_of_a_source_that_does_not_answer_ends(waves: Waves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "SOURCE_WITHIN_S", 0.05)

    async def inventory(_: UUID) -> Inventory:
        await asyncio.sleep(60)
        raise AssertionError

    importer = Importer(waves, lambda: [SILENT], inventory)
    query = VmQuery.model_validate({"source_id": SILENT.id, "name": "spring"})
    with pytest.raises(SourceUnreachable, match="did not answer within"):
        asyncio.run(importer.select(query, dry_run=True))
    found = asyncio.run(importer.take(b"vm\nweb\n", name=None, into=None, dry_run=True))
    assert found.problems[-1].detail == "the VMs of source silent are not known: the source did not answer within 0 s"
