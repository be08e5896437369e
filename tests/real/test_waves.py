"""One whole wave: six guests by two services over one PostgreSQL, onto two destinations; real copies, and real deaths."""

import json
import random
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from synvirt.copying import request_bytes
from synvirt.fleet.model import ApprovalRequest, MemberState, Wave, WaveRequest, WaveState, WaveUpdate
from synvirt.fleet.waves import Waves
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.values import now
from synvirt.sizes import KIB, MIB
from synvirt.store.waves import LEADER_LOCK
from tests.fleet.wave_service import SECOND, house_of
from tests.house import live_plan
from tests.running.ports import free_port
from tests.running.processes import ready, stopped, until, workers

S, W = MemberState, WaveState
DISK = "disk-0"
DISK_BYTES = 4 * MIB
HOSTS = ("a", "b")
# Where each goes; None: the default.
GUESTS = {"canary": None, "db": None, "web": SECOND, "pair-1": None, "pair-2": SECOND, "alone": SECOND}
WAVE_AT_ONCE = 2
# Two at once would have more.
COPY_BPS, WAVE_BPS = MIB, 3 * MIB // 2


class Page:
    """What the canary's guest answers, once it is looked at."""

    def __init__(self) -> None:
        page = self
        self.status, self.asked = 503, 0

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page.asked += 1
                self.send_response(page.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/health"

    @contextmanager
    def served(self) -> Iterator[None]:
        thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            self.server.shutdown()
            thread.join()
            self.server.server_close()


class Night:
    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url, self.shared = folder, url, folder / "shared"
        self.shared.mkdir()
        self.house = house_of(folder / "watching", url, "watching", self.shared)
        self.store, self.platform = self.house.store, self.house.platform
        self.waves = Waves(self.store.waves)
        self.services: dict[str, subprocess.Popen[str]] = {}
        for number, name in enumerate(GUESTS):
            self.platform.add_vm(name, {DISK: random.Random(number).randbytes(DISK_BYTES)})

    @contextmanager
    def service(self, host: str) -> Iterator[None]:
        environment = {"HOST": host, "LEASE_S": "6", "SHARED": str(self.shared)}
        arguments = [str(self.folder / host), f"{self.url}&application_name={host}"]
        with ready("tests.fleet.wave_service", *arguments, log=self.folder / f"{host}.log", **environment) as process:
            self.services[host] = process
            yield

    def wave(self, wave_id: UUID) -> Wave:
        return self.waves.whole(wave_id)

    def until(self, wave_id: UUID, what: Callable[[dict[str, Any]], bool]) -> Wave:
        """`what` gets the members by their ids."""
        until(lambda: what({one.id: one for one in self.wave(wave_id).members}), 120)
        return self.wave(wave_id)

    def job(self, wave: Wave, name: str) -> Migration:
        job_id = next(one.job_id for one in wave.members if one.id == name)
        assert job_id is not None
        return self.store.get(job_id)

    def volume(self, job: Migration) -> bytes:
        (disk,) = job.disks
        assert disk.volume is not None
        return Path(self.house.rooms.destination_named(job.destination).device(disk.volume)).read_bytes()

    def disk(self, name: str) -> bytes:
        return self.platform.disk_path(name, DISK).read_bytes()

    def powered(self, name: str, power: str) -> list[float]:
        return [at for to, at in self.platform.vm(name)["powered"] if to == power]

    def booted(self, name: str) -> list[float]:
        found = [(self.folder / host / "boots") for host in HOSTS]
        lines = [line.split() for path in found if path.exists() for line in path.read_text().splitlines()]
        return sorted(float(at) for booted, at in lines if booted == name)

    def domains(self) -> list[str]:
        files = [path for host in HOSTS if (path := self.folder / host / "domains.json").exists()]
        return sorted(domain["name"] for path in files for domain, running in json.loads(path.read_text()) if running)

    def copying(self, wave: Wave) -> dict[str, UUID]:
        """The jobs that copy and whose watermark says so, by the host that has them."""
        jobs = [one.job_id for one in wave.members if one.state is S.SYNCING and one.job_id is not None]
        return {self.store.host_of(job_id): job_id for job_id in jobs if self.store.watermarks(job_id, 1)}

    def copied_bytes(self, wave: Wave) -> int:
        """By all jobs that the wave has now, as far as is durable."""
        jobs = [one.job_id for one in wave.members if one.job_id is not None]
        return sum(mark.bytes_done for job_id in jobs for mark in self.store.watermarks(job_id, 1).values())

    def updates(self, wave_id: UUID) -> list[WaveUpdate]:
        """What happened to members, in its order."""
        events = self.store.waves.events_after(0, job_id=wave_id, limit=10_000)
        updates = [WaveUpdate.model_validate_json(one.document) for one in events]
        return [one for one in updates if one.member is not None]


@pytest.fixture
def night(tmp_path: Path, postgresql_url: str) -> Iterator[Night]:
    night = Night(tmp_path, postgresql_url)
    with ExitStack() as stack:
        stack.callback(night.house.close)
        for host in HOSTS:
            stack.enter_context(night.service(host))
        yield night


def wave_of(page: Page, port: int) -> WaveRequest:
    def member(name: str, **fields: Any) -> dict[str, Any]:
        plan = live_plan(
            warm={"delta_threshold_bytes": MIB, "interval_s": 3},
            # So slow that it can be killed meanwhile.
            limits={} if name == "canary" else {"bandwidth_bps": COPY_BPS},
            target={"destination": GUESTS[name]},
        )
        ref = plan.source_ref.model_copy(update={"vm_id": name})
        return {"id": name, "vm": name, "plan": plan.model_copy(update={"source_ref": ref}), "window_id": "night", **fields}

    def window(id_: str, opens_in: timedelta) -> dict[str, Any]:
        start = (now() + opens_in).replace(tzinfo=None)
        return {"id": id_, "name": id_, "start": start, "end": start + timedelta(hours=4)}

    return WaveRequest.model_validate(
        {
            "name": "six",
            "members": [
                member("canary", priority=1, window_id="noon", checks=[{"kind": "http", "url": page.url, "within_s": 0.5}]),
                member("web", after=["db"]),
                member("db", checks=[{"kind": "port", "port": port, "within_s": 600}]),
                member("pair-1", group="pair"),
                member(
                    "pair-2", group="pair", after=["pair-1"], checks=[{"kind": "command", "argv": ["app"], "within_s": 0.5}]
                ),
                member("alone"),
            ],
            "groups": [{"name": "pair", "rule": "together"}],
            "windows": [window("noon", timedelta(hours=-1)), window("night", timedelta(hours=5))],
            "limits": {
                "per_destination": 1,
                "wave": WAVE_AT_ONCE,
                "per_source_host": WAVE_AT_ONCE,
                "bandwidth_bps": WAVE_BPS,
            },
            "canary": {"count": 1, "gate": "approval"},
            "on_failure": "roll_back",
        }
    )


def test_six_guests_over_two_services(night: Night) -> None:
    page, port = Page(), free_port()
    (night.shared / "ill" / "app").touch()
    with page.served():
        made = night.waves.create(wave_of(page, port))
        night.waves.go(made.id)
        first = canary_fails(night, made.id, page)
        canary_is_tried_again(night, made.id, page)
        dies_in_the_middle(night, made.id)
        opened_at = night_falls(night, made.id)
        ended = moves(night, made.id, port)
    assert ended.state is W.FAILED
    assert ended.reason == "0 of 6 failed, 2 were rolled back."
    back = {"pair-1", "pair-2"}
    assert {one.id: one.state for one in ended.members} == {
        name: S.ROLLED_BACK if name in back else S.HEALTHY for name in GUESTS
    }
    # Each as it was at its source, the last writes of its guest included; those that went back are kept.
    assert {name: night.volume(night.job(ended, name)) == night.disk(name) for name in GUESTS} == dict.fromkeys(GUESTS, True)
    assert night.volume(first) == random.Random(0).randbytes(DISK_BYTES)
    assert {name: night.platform.vm(name)["power"] for name in GUESTS} == {
        name: "on" if name in back else "off" for name in GUESTS
    }
    assert night.domains() == sorted(GUESTS.keys() - back)
    for name in GUESTS.keys() - {"canary"}:
        (off_at,) = night.powered(name, "off")
        assert off_at >= opened_at, "no cut-over begins outside of its window"
    assert night.powered("web", "off")[0] >= night.booted("db")[0]
    assert night.powered("pair-2", "off")[0] >= night.booted("pair-1")[0]
    updates = night.updates(made.id)
    for state in (S.SYNCING, S.CUTTING_OVER):
        assert most_at_once(updates, state) == {"first": 1, SECOND: 1, "all": WAVE_AT_ONCE}
    assert [night.platform.vm(name)["snapshots"] for name in GUESTS] == [{}] * len(GUESTS)


def canary_fails(night: Night, wave_id: UUID, page: Page) -> Migration:
    """It is rolled back, and nothing else has begun. Its job."""
    seen = night.until(wave_id, lambda members: members["canary"].state is S.ROLLED_BACK)
    assert page.asked
    assert seen.state is W.RUNNING
    canary, *others = seen.members
    assert "answers 503" in (canary.cause or "")
    assert {(one.state, one.job_id) for one in others} == {(S.WAITING, None)}
    assert night.platform.vm("canary")["power"] == "on"
    assert night.domains() == []
    assert [night.platform.vm(name)["powered"] for name in GUESTS if name != "canary"] == [[]] * 5
    return night.job(seen, "canary")


def canary_is_tried_again(night: Night, wave_id: UUID, page: Page) -> None:
    page.status = 204
    night.platform.guest_writes("canary", DISK, 0, b"mended")
    night.waves.retry(wave_id, "canary")
    seen = night.until(wave_id, lambda members: "approv" in (members["alone"].waits_for or ""))
    canary, *others = seen.members
    assert canary.state is S.HEALTHY
    # Placed beforehand, evenly; each by a host that says why.
    assert {one.host for one in others} == set(HOSTS)
    unsaid = [one for one in seen.members if not (one.placed or "").startswith(f"{one.host}/{one.destination}: ")]
    assert [(one.id, one.state, one.host, one.destination, one.placed) for one in unsaid] == []
    assert {(one.state, one.job_id) for one in others} == {(S.WAITING, None)}


def dies_in_the_middle(night: Night, wave_id: UUID) -> None:
    """The others are approved; and the service that leads the wave is killed while it copies one of them."""
    with psycopg.connect(night.url, autocommit=True) as connection:

        def leads() -> str | None:
            found = connection.execute(
                "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid)"
                " WHERE locktype = 'advisory' AND granted AND objid = %s",
                (LEADER_LOCK,),
            ).fetchone()
            return None if found is None else str(found[0])

        killed: dict[str, UUID] = {}
        before, began = night.copied_bytes(night.wave(wave_id)), time.monotonic()
        night.waves.approve(wave_id, ApprovalRequest(canary=True))
        while not killed:
            assert time.monotonic() < began + 60
            seen = night.wave(wave_id)
            copied = night.copied_bytes(seen) - before
            # A piece of each, that it may have read at once.
            assert copied <= WAVE_BPS * (time.monotonic() - began) + WAVE_AT_ONCE * request_bytes(WAVE_BPS)
            copying = night.copying(seen)
            for _ in range(200):
                if (host := leads()) in copying:
                    # What was seen may have passed meanwhile: it is looked at again while it stands still.
                    process = night.services[host]
                    process.send_signal(signal.SIGSTOP)
                    stopped(process.pid)
                    if leads() == host and night.store.get(copying[host]).state is State.COPYING_FULL:
                        process.kill()
                        killed[host] = copying[host]
                    else:
                        process.send_signal(signal.SIGCONT)
                    break
    ((victim, job_id),) = killed.items()
    (survivor,) = set(HOSTS) - {victim}
    offset = night.store.watermarks(job_id, 1)[DISK].offset_bytes
    assert night.store.get(job_id).state is State.COPYING_FULL
    until(lambda: night.store.host_of(job_id) == survivor, 60)
    assert workers(night.services[victim].pid) == []
    assert night.store.watermarks(job_id, 1)[DISK].offset_bytes >= offset > 0
    seen = night.until(wave_id, lambda members: all(one.state in (S.READY, S.HEALTHY) for one in members.values()))
    hosts = {one.id: night.store.host_of(one.job_id) for one in seen.members if one.job_id and one.state is S.READY}
    assert set(hosts.values()) == {survivor}
    assert len({one.job_id for one in seen.members}) == 6


def night_falls(night: Night, wave_id: UUID) -> float:
    """All wait for it till then. When that was."""
    seen = night.until(wave_id, lambda members: all(one.waits_for for one in members.values() if one.state is S.READY))
    reasons = {one.id: one.waits_for or "" for one in seen.members}
    assert "opens on" in reasons["alone"]
    assert "db" in reasons["web"]
    assert [night.platform.vm(name)["powered"] for name in GUESTS if name != "canary"] == [[]] * 5
    for number, name in enumerate(GUESTS):
        night.platform.guest_writes(name, DISK, number * 128 * KIB, b"written in the evening")
    opened_at = time.time()
    new = night.shared / "later.new"
    new.write_text(str(timedelta(hours=5, minutes=1).total_seconds()))
    new.rename(night.shared / "later")
    return opened_at


def moves(night: Night, wave_id: UUID, port: int) -> Wave:
    """The database boots, and its port does not answer: till then nothing that needs it begins."""
    seen = night.until(wave_id, lambda members: bool(night.booted("db")) and members["alone"].state is S.HEALTHY)
    states = {one.id: one.state for one in seen.members}
    assert (states["db"], states["web"]) == (S.CUTTING_OVER, S.READY)
    assert night.platform.vm("web")["power"] == "on"
    with socket.create_server(("127.0.0.1", port)):
        until(lambda: night.wave(wave_id).finished_at is not None, 60)
    return night.wave(wave_id)


def most_at_once(updates: list[WaveUpdate], state: MemberState) -> dict[str, int]:
    """By destination, and of the whole wave."""
    states: dict[str, MemberState | None] = {}
    most = Counter[str]()
    for one in updates:
        assert one.member is not None
        states[one.member] = one.member_state
        running = [name for name, its in states.items() if its is state]
        by_place = Counter(GUESTS[name] or "first" for name in running)
        for place, count in (*by_place.items(), ("all", len(running))):
            most[place] = max(most[place], count)
    return dict(most)
