"""The rate that a wave's copies share, whatever hosts of ours they run on. Blocks."""

from functools import partial

from synvirt.fleet.records import wave_of
from synvirt.migrations.sharing import SharedRate
from synvirt.model.job import Migration
from synvirt.store.waves import WaveRows


def rate_of(rows: WaveRows, job: Migration) -> SharedRate | None:
    """None: the job is no member's, or its wave has no limit. PersistFailed, Unreadable."""
    # A job that was begun from the start on another host is its member's before the wave has noticed.
    row = rows.of_jobs([one for one in (job.id, job.restart_of) if one is not None])
    limit = None if row is None else wave_of(row).limits.bandwidth_bps
    if row is None or limit is None:
        return None
    return SharedRate(limit, partial(rows.take_rate, row.id))
