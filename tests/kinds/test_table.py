"""Every kind of job that the product has stands in the table, and so does each way that it goes."""

from typing import get_args

from synvirt.backups.model import BackupRun, RestoreRequest
from synvirt.store.tables import METADATA
from tests.kinds.table import KINDS

# Of each table that has jobs: what its jobs are called. Those of `backups` say it themselves.
JOBS = {"migrations": "migration", "rehearsals": "rehearsal", "waves": "wave"}
# What has a state and is no job: documents of backups by their kind, what jobs made, a wave's members, what its hooks are sent.
NO_JOBS = {"backups", "ledger", "wave_members", "wave_deliveries"}


def test_every_table_of_jobs_is_known() -> None:
    assert {table.name for table in METADATA.sorted_tables if "state" in table.c} == {*JOBS, *NO_JOBS}


def test_every_kind_of_job_has_a_line() -> None:
    kinds = {*JOBS.values(), *get_args(BackupRun.model_fields["kind"].annotation)}
    assert {kind.name for kind in KINDS} == kinds


def test_every_target_of_a_restore_has_a_line() -> None:
    targets = get_args(RestoreRequest.model_fields["target"].annotation)
    assert {kind.way.partition(",")[0] for kind in KINDS if kind.name == "restore"} == set(targets)


def test_each_line_is_reported_from_the_others() -> None:
    assert len({str(kind) for kind in KINDS}) == len(KINDS)
