"""The metrics of backups: how runs end, what they read and store, and how old the newest restore points are.

    events of runs since the last look ─▶ counters
    jobs and points, as they are now   ─▶ ages and states, looked at again only when a run was written, and once a minute

No label grows with use except the jobs, which people make by hand: their ids, and their names.
"""

import json
import threading
import time
from collections import Counter as Count
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from synvirt.backups.model import ENDS, UNENDED, BackupJob
from synvirt.backups.points import PointFigures
from synvirt.backups.service import Backups
from synvirt.model.values import now
from synvirt.store.tables import POINT_STATES

EVENTS_A_PAGE = 200
# Points also change without a run: people protect and remove them.
LOOK_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """`newest_at`: by job, as in PointFigures, for each guest that the job still backs up and has a point of."""

    jobs: list[BackupJob]
    points: PointFigures
    newest_at: dict[UUID, list[float | None]]


class BackupMetrics(Collector):
    """The figures of backups for /metrics, as a collector of prometheus_client's registry."""

    def __init__(self, backups: Backups, registry: CollectorRegistry) -> None:
        self._backups, self._lock = backups, threading.Lock()
        self._cursor = backups.runs.last_event_id()
        self._looked: tuple[int, float, _Seen] | None = None
        registry.register(self)  # before its counters: it is asked first, and updates them
        self._ended = Counter("synvirt_backup_runs_ended", "Runs that ended", ["kind", "status"], registry=registry)
        self._read = Counter("synvirt_backup_read_bytes", "Bytes that backup runs read of disks", registry=registry)
        self._stored = Counter("synvirt_backup_stored_bytes", "Bytes that repositories grew by", registry=registry)
        for kind in ("backup", "verify"):
            self._ended.labels(kind, "failed")  # from 0 on: so that an alert sees the first one as an increase

    def collect(self) -> Iterator[Metric]:
        """The figures of this moment; the counters are brought up to date first."""
        with self._lock:
            self._catch_up()
            seen = self._look()
        under_way = Count(str(status) for status, _ in self._backups.runs.figures.latest().values())
        runs = GaugeMetricFamily("synvirt_backup_runs", "Runs under way", labels=["status"])
        for status in UNENDED:
            runs.add_metric([str(status)], under_way[str(status)])
        yield runs
        points = GaugeMetricFamily("synvirt_backup_points", "Restore points", labels=["state"])
        for state in POINT_STATES:
            points.add_metric([state], seen.points.states[state])
        yield points
        labels, moment = ["backup_job", "name"], now()
        success = GaugeMetricFamily(
            "synvirt_backup_last_success_age_seconds",
            "Since the last run of a job that completed; since it was made, where none did",
            labels=labels,
        )
        guests = GaugeMetricFamily(
            "synvirt_backup_oldest_guest_age_seconds",
            "Age of the newest good restore point, of the guest of a job that is worst off",
            labels=labels,
        )
        for job in seen.jobs:
            key = [str(job.id), job.name]
            since, made_at = job.last_success_at, job.created_at.timestamp()
            # What a clock that was ahead has stamped must keep no alarm silent: nothing is older than its job.
            known = since if since is not None and since <= moment else job.created_at
            success.add_metric(key, max(0.0, (moment - known).total_seconds()))
            if mine := seen.newest_at[job.id]:
                guests.add_metric(key, max(0.0, moment.timestamp() - min(at or made_at for at in mine)))
        yield success
        yield guests

    def _catch_up(self) -> None:
        while True:
            page = self._backups.runs.events_after(self._cursor, limit=EVENTS_A_PAGE)
            for event in page:
                run = json.loads(event.document)
                self._cursor = event.id
                if run["status"] in ENDS:
                    self._ended.labels(run["kind"], run["status"]).inc()
                    self._stored.inc(run["stored_bytes"])
                    if run["kind"] == "backup":
                        self._read.inc(run["progress"]["bytes_done"])
            if len(page) < EVENTS_A_PAGE:
                return

    def _look(self) -> _Seen:
        commits, moment = self._backups.runs.figures.commits, time.monotonic()
        if self._looked is not None and self._looked[0] == commits and moment - self._looked[1] < LOOK_AGAIN_S:
            return self._looked[2]
        jobs, points = self._backups.all_jobs(), self._backups.points.figures()
        seen = _Seen(jobs, points, {job.id: self._newest_of(job, points) for job in jobs})
        self._looked = (commits, moment, seen)
        return seen

    def _newest_of(self, job: BackupJob, points: PointFigures) -> list[float | None]:
        """As in `_Seen`. A guest that was taken out of its job keeps its points, and gets no new one: it would be the worst off
        until its last point is removed."""
        newest = {vm_id: at for (job_id, vm_id), at in points.newest_at.items() if job_id == job.id}
        members, names = set(job.vm_ids), [one for one in job.vm_ids if one not in newest]
        if names and not newest.keys() <= members:
            members |= self._backups.points.guests_named(job.id, names)
        return [at for vm_id, at in newest.items() if vm_id in members]
