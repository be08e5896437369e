"""The rate that a wave's copies share, on all our hosts. Blocks."""

from functools import partial

from synvirt.fleet.records import wave_of
from synvirt.migrations.sharing import SharedRate
from synvirt.model.job import Migration
from synvirt.store.waves import WaveRows


def rate_of(rows: WaveRows, job: Migration) -> SharedRate | None:
    """The shared rate. None: the job is no member's, or its wave has no limit. PersistFailed, Unreadable."""
    # A job that was restarted on another host belongs to its member even before the wave has noticed.
    row = rows.of_jobs([one for one in (job.id, job.restart_of) if one is not None])
    limit = None if row is None else wave_of(row).limits.bandwidth_bps
    if row is None or limit is None:
        return None
    return SharedRate(limit, partial(rows.take_rate, row.id))
