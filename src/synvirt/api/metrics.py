"""/metrics: what a Prometheus server collects of this host (text format 0.0.4, or OpenMetrics on request).

    store's events since the last look ─▶ counters (ends, errors, bytes)   ─┐
    board, counts of the store          ─▶ what is so at this moment        ─┼─▶ text
    each answer of the HTTP interface   ─▶ a histogram                      ─┘

No label grows with use: states, codes, kinds of source and routes are lists of ours, destinations are the settings'. A request
costs two short queries and the events since the last one, whether there are 5,000 ended jobs or none. Counters begin at the
service's start, as Prometheus expects.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import TypeAdapter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from synvirt import __version__
from synvirt.api.routing import Routes
from synvirt.errors import BY_CODE, NotFound
from synvirt.jobs.board import Board
from synvirt.model.kinds import ENDS, State
from synvirt.model.values import Time, now
from synvirt.store import Store

# The most events that one request counts, so that a caller after a long pause does not wait. The next request goes on.
EVENTS_A_LOOK = 2000
EVENTS_A_PAGE = 200
# From the scheduler's next tick to a missed window.
FORECAST_BUCKETS_S = (60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86400.0, 7 * 86400.0)
# From an answer out of memory to a query of a source over a slow line; a stream counts until it begins.
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DOWNTIME_BUCKETS_S = (5, 10, 30, 60, 120, 300, 600, 1800, 3600)
# For unknown values: a path that is not served, an unknown method, a code of a later version.
OTHER = "other"
METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "PUT", "DELETE", "OPTIONS"})
CODES = tuple(sorted(code for code in BY_CODE if code.startswith("E_MIG_")))


@dataclass(slots=True)
class _Seen:
    """What has been counted of a job that has not ended."""

    way: tuple[str, str]
    bytes_done: int
    error_at: str
    # Whether this host had it then.
    here: bool = True


class Metrics:
    """One for each service. `host`: whose jobs are counted, if several share a database. `refusals`: of log-ins, so far."""

    def __init__(
        self, store: Store, board: Board, *, host: str, jobs_at_once: int, refusals: Callable[[], int] = lambda: 0
    ) -> None:
        self._refusals = refusals
        self._store, self._board, self._host, self._jobs_at_once = store, board, host, jobs_at_once
        self._lock = threading.Lock()
        self._began_at = _json_time()
        self._cursor = store.last_event_id()
        self._seen: dict[str, _Seen] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        self._ended = Counter("synvirt_jobs_ended", "Jobs that ended", ["state", "source"], registry=self.registry)
        self._errors = Counter("synvirt_job_errors", "Errors of jobs, by E_ code", ["code"], registry=self.registry)
        for code in (*CODES, OTHER):
            self._errors.labels(code)  # from 0 on: so that an alert sees the first one as an increase
        way = ["source", "destination"]
        self._bytes = Counter("synvirt_copied_bytes", "Bytes of disks copied", way, registry=self.registry)
        self._downtime = Histogram(
            "synvirt_downtime_seconds",
            "From a source's shutting down to the first sign of life here, of jobs that completed",
            buckets=DOWNTIME_BUCKETS_S,
            registry=self.registry,
        )
        self._outage_error = Histogram(
            "synvirt_outage_error_seconds",
            "How far the outage was from the p50 that was forecast when the guest was shut down",
            buckets=DOWNTIME_BUCKETS_S,
            registry=self.registry,
        )
        self._wave_error = Histogram(
            "synvirt_wave_forecast_error_seconds",
            "By how much the cut-over of a wave's member missed its forecast; of all hosts, the same on each",
            buckets=FORECAST_BUCKETS_S,
            registry=self.registry,
        )
        self._wave_cursor = store.waves.last_event_id()
        self._outages = Counter(
            "synvirt_outages_forecast",
            "Outages that were forecast, by whether they kept the p95",
            ["kept"],
            registry=self.registry,
        )
        for kept in ("true", "false"):
            self._outages.labels(kept)
        self.answers = Histogram(
            "synvirt_http_answer_seconds",
            "Until an answer of the HTTP interface began",
            ["method", "route", "status"],
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(_Present(self))

    def text(self, accept: str) -> tuple[bytes, str]:
        """All metrics as text, and the media type. Blocking."""
        encode, media_type = choose_encoder(accept)
        with self._lock:
            self._catch_up()
            return encode(self.registry), media_type

    def present(self) -> Iterator[Metric]:
        """The state at this moment."""
        yield _gauge("synvirt_build", "The version that runs", ["version"], {(__version__,): 1})
        refused = CounterMetricFamily("synvirt_logins_refused", "Log-ins that were refused")
        refused.add_metric([], self._refusals())
        yield refused
        counts = self._store.count_by_state(host=self._host)
        states: dict[tuple[str, ...], float] = {(str(state),): counts.get(state, 0) for state in State}
        yield _gauge("synvirt_jobs", "Jobs in the store", ["state"], states)
        yield _gauge("synvirt_jobs_at_once", "Jobs that may copy at the same time", [], {(): self._jobs_at_once})
        held: dict[tuple[str, ...], float] = {}
        waiting: dict[tuple[str, ...], float] = {}
        for resource, counted in self._store.slots.counts().items():
            held[(resource,)], waiting[(resource,)] = map(float, counted)
        what = "of a source's host, a destination, a repository, a host's guests; of all hosts"
        yield _gauge("synvirt_slots_held", f"Jobs that copy, {what}", ["resource"], held)
        yield _gauge("synvirt_slots_waiting", f"Jobs that wait for a slot, {what}", ["resource"], waiting)
        oldest = self._store.oldest(State.QUEUED, host=self._host)
        waits_s = 0.0 if oldest is None else max(0.0, (now() - oldest.created_at).total_seconds())
        yield _gauge("synvirt_queue_oldest_seconds", "How long the first job of the queue waits", [], {(): waits_s})
        rates: defaultdict[tuple[str, ...], float] = defaultdict(float, dict.fromkeys(self._bytes_ways(), 0.0))
        for id_, (_, progress) in self._board.latest().items():
            if (seen := self._seen.get(str(id_))) is not None:
                rates[seen.way] += progress.rate_bps
        yield _gauge("synvirt_copy_rate_bytes_per_second", "Copied at this moment", ["source", "destination"], rates)

    def _bytes_ways(self) -> set[tuple[str, ...]]:
        """The ways of earlier bytes: without new bytes their rate is 0, not missing."""
        return {
            tuple(sample.labels[name] for name in ("source", "destination"))
            for metric in self._bytes.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }

    def _catch_up(self) -> None:
        for _ in range(EVENTS_A_LOOK // EVENTS_A_PAGE):
            page = self._store.events_after(self._cursor, host=self._host, limit=EVENTS_A_PAGE)
            for event in page:
                self._cursor = event.id  # first: one that cannot be counted is not met again
                self._count(json.loads(event.document))
            if len(page) < EVENTS_A_PAGE:
                break
        for _ in range(EVENTS_A_LOOK // EVENTS_A_PAGE):
            events = self._store.waves.events_after(self._wave_cursor, job_id=None, limit=EVENTS_A_PAGE)
            for one in events:
                self._wave_cursor = one.id
                if (late := json.loads(one.document).get("late_s")) is not None:
                    self._wave_error.observe(abs(late))
            if len(events) < EVENTS_A_PAGE:
                break
        for id_, (_, progress) in self._board.latest().items():
            seen = self._seen_here(str(id_)) or self._from_before(id_)
            if seen is not None:
                self._count_bytes(seen, progress.bytes_done)

    def _from_before(self, job_id: UUID) -> _Seen | None:
        """A job from before our start that has not changed since: its document gives the way, once. None, where it has ended:
        the board forgets it a moment later, and its bytes are counted already."""
        try:
            job = self._store.get(job_id)
        except NotFound:
            return None
        return None if job.ended else self._first_seen(json.loads(job.model_dump_json()))

    def _first_seen(self, job: dict[str, Any]) -> _Seen:
        """Bytes copied before our start, by the job that this one continues, or by the host that had it before, are not counted
        again."""
        if job["id"] in self._seen:
            seen = self._of_another_host(job, here=True)
        else:
            ours = job["created_at"] >= self._began_at and job["retry_of"] is None
            seen = _Seen(way=_way(job), bytes_done=0 if ours else job["progress"]["bytes_done"], error_at=self._began_at)
        self._seen[job["id"]] = seen
        return seen

    def _seen_here(self, job_id: str) -> _Seen | None:
        seen = self._seen.get(job_id)
        return seen if seen is not None and seen.here else None

    def _of_another_host(self, job: dict[str, Any], *, here: bool) -> _Seen:
        """What the host that had the job before has copied and met: that host counts it."""
        error_at = max(self._began_at, (job["last_error"] or {}).get("at", ""))
        return _Seen(way=_way(job), bytes_done=job["progress"]["bytes_done"], error_at=error_at, here=here)

    def _count(self, job: dict[str, Any]) -> None:
        if job["host"] not in (None, self._host):  # it has come here since
            self._seen[job["id"]] = self._of_another_host(job, here=False)
            return
        seen = self._seen_here(job["id"]) or self._first_seen(job)
        seen.way = _way(job)
        self._count_bytes(seen, job["progress"]["bytes_done"])
        error = job["last_error"]
        if error is not None and error["at"] > seen.error_at:
            seen.error_at = error["at"]
            self._errors.labels(error["code"] if error["code"] in CODES else OTHER).inc()
        if job["state"] in ENDS:
            self._ended.labels(job["state"], seen.way[0]).inc()
            if job["state"] == State.COMPLETED and job["downtime_s"] is not None:
                self._downtime.observe(job["downtime_s"])
                if (forecast := job.get("outage")) is not None:
                    self._outage_error.observe(abs(job["downtime_s"] - forecast["p50_s"]))
                    self._outages.labels(str(job["downtime_s"] <= forecast["p95_s"]).lower()).inc()
            del self._seen[job["id"]]

    def _count_bytes(self, seen: _Seen, bytes_done: int) -> None:
        # The board is ahead of the document, and a pass that went back to its watermark is behind: only new bytes count.
        new = bytes_done - seen.bytes_done
        if new > 0:
            self._bytes.labels(*seen.way).inc(new)
            seen.bytes_done = bytes_done


class _Present(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.present()


class Timed:
    """A layer of the app: how long each answer took to begin. `prefixes` of ours are shown before a route's own path; the
    longest comes first."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, prefixes: tuple[str, ...]) -> None:
        self._app, self._answers, self._prefixes = app, metrics.answers, prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, observed = time.monotonic(), False

        def observe(status: int) -> None:
            nonlocal observed
            if not observed:
                observed = True
                method = scope["method"] if scope["method"] in METHODS else OTHER
                labels = (method, self._route(scope), f"{status // 100}xx")
                self._answers.labels(*labels).observe(time.monotonic() - began)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                observe(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            observe(500)
            raise

    def _route(self, scope: Scope) -> str:
        """The route's template. FastAPI's lacks the prefix that a router is mounted at, so that is added."""
        template = getattr(scope.get("route"), "path_format", None)
        if template is None:
            return OTHER
        prefix = next((prefix for prefix in self._prefixes if scope["path"].startswith(f"{prefix}/")), "")
        return str(template) if template.startswith(f"{prefix}/") else f"{prefix}{template}"


def metrics_router(metrics: Metrics) -> APIRouter:
    """The route of /metrics."""
    router = Routes(tags=["service"])

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def collect(request: Request) -> Response:
        """What Prometheus collects: docs/monitoring.md. It needs credentials like the rest: it says how busy this host is."""
        body, media_type = await run_in_threadpool(metrics.text, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": media_type})

    return router


def _gauge(name: str, help_: str, labels: list[str], values: dict[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(name, help_, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _way(job: dict[str, Any]) -> tuple[str, str]:
    """The kind of the source, `repair` for a job that compares; and the destination's name: `default` until the job has chosen
    one."""
    (kind,) = job["plan"]["source"].values() if job.get("repair") is None else ("repair",)
    return kind, job["destination"] or job["plan"]["target"]["destination"] or "default"


def _json_time() -> str:
    """The present time in the form of a job's document: such times sort as text."""
    return str(_TIME.dump_python(now(), mode="json"))


_TIME: TypeAdapter[datetime] = TypeAdapter(Time)
