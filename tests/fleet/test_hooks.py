"""Webhooks of waves, sent to a real server: signed, in order, tried again, given up; and commands of the settings."""

import base64
import hashlib
import hmac
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select, update

from synvirt import programs
from synvirt.errors import Internal
from synvirt.fleet.model import MemberState, Wave, WaveState
from synvirt.fleet.waves import Waves
from synvirt.fleet.webhooks.delivering import FIRST_PAUSE_S, GIVEN_UP_AFTER_S, LONGEST_PAUSE_S, Delivering, Ways, confined
from synvirt.fleet.webhooks.events import Hooks
from synvirt.keyring import Keyring
from synvirt.migrations.sources.registered import Sources
from synvirt.outgoing import Guard
from synvirt.settings import WaveCommandSetting
from synvirt.store.documents import VERSION
from synvirt.store.tables import wave_deliveries, wave_hooks, waves
from synvirt.store.wave_hooks import DELIVERED, GIVEN_UP, PENDING, DeliveryRow, NewDelivery, add_deliveries
from tests.fleet.carrying.night import Night, wave
from tests.running.processes import until

SECRET = "whsec_" + base64.b64encode(b"a key of thirty-two bytes, or so").decode()
LOCAL = Guard(("127.0.0.0/8",))


@dataclass
class Receiver:
    """A server that notes what it gets, and answers with the next of `answers`, then 204."""

    answers: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, body in self.got]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(made.answers.pop(0) if made.answers else 204)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_address[1]}/in/a/secret/path?x=1"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield made
        server.shutdown()
        thread.join()


class HookedNight(Night):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.keyring = Keyring(folder / "migrator.key")
        self.commands: dict[str, WaveCommandSetting] = {}
        self.anew(LOCAL)

    def anew(self, guard: Guard) -> Delivering:
        """The sender with nothing in memory."""
        hooks = Hooks(self.keyring, "local", frozenset(self.commands))
        self.waves = Waves(self.store.waves, own=hooks)
        self.delivering = Delivering(self.store.waves, self.store.wave_hooks, hooks, Ways(guard, None, self.commands))
        self.carrying._delivering = self.delivering
        return self.delivering

    def hooked(self, *hooks: dict[str, Any], **fields: Any) -> Wave:
        return self.waves.create(wave({"id": "db"}, hooks=hooks, **fields))

    def deliveries(self, wave_id: UUID) -> list[DeliveryRow]:
        return self.store.wave_hooks.page(wave_id, limit=100)[0][::-1]

    def pauses_are_over(self, **more: Any) -> None:
        with self.store.wave_hooks._writing() as db:
            db.execute(update(wave_deliveries).values(next_at=0, **more))

    def sent(self) -> DeliveryRow:
        """The oldest that is due, after an attempt."""
        (one, *_) = self.store.wave_hooks.due(limit=1)
        self.delivering.send(one)
        return next(found for found in self.deliveries(one.wave_id) if found.number == one.number)

    def close(self) -> None:
        self.delivering.close()
        super().close()


@pytest.fixture
def night(tmp_path: Path) -> Iterator[HookedNight]:
    made = HookedNight(tmp_path / "house")
    yield made
    made.close()


def test_a_wave_sends_its_webhook_each_event_in_order_and_signed(night: HookedNight, receiver: Receiver) -> None:
    night.vms("db")
    made = night.hooked({"url": receiver.url, "secret": SECRET, "required": True})
    night.waves.go(made.id)
    night.until(made.id, lambda seen: seen.state is WaveState.COMPLETED and len(receiver.got) == 4)
    events = [body["event"] for body in receiver.bodies]
    assert events == ["wave_began", "cutover_began", "cutover_ended", "wave_ended"]
    ended, last = receiver.bodies[2:]
    assert (ended["member"]["id"], ended["member"]["state"], ended["member"]["outage_s"] >= 0) == ("db", "healthy", True)
    assert (last["wave"]["id"], last["wave"]["state"], "member" in last) == (str(made.id), "completed", False)
    # By the words of Standard Webhooks, and not by our own function.
    for headers, body in receiver.got:
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        digest = hmac.new(base64.b64decode(SECRET.removeprefix("whsec_")), signed, hashlib.sha256).digest()
        assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 4
    until(lambda: all(one.state == DELIVERED for one in night.deliveries(made.id)))


def test_only_the_events_that_are_wanted_are_sent(night: HookedNight, receiver: Receiver) -> None:
    night.vms("db")
    sick = {"id": "db", "approvers": ["owner"], "checks": [{"kind": "command", "argv": ["false"], "within_s": 0.1}]}
    hook = {"url": receiver.url, "secret": SECRET, "events": ["approval_needed", "member_failed", "wave_held"]}
    made = night.waves.create(wave(sick, hooks=[hook]))
    night.waves.go(made.id)
    night.until(made.id, lambda _: len(receiver.got) == 1)
    assert receiver.bodies[0]["member"]["approvals_missing"] == ["owner"]
    night.waves.approve(made.id, _approval("owner"))
    night.until(made.id, lambda seen: seen.members[0].state is MemberState.FAILED and len(receiver.got) == 3)
    assert {body["event"] for body in receiver.bodies} == {"approval_needed", "member_failed", "wave_held"}


def _approval(approver: str) -> Any:
    from synvirt.fleet.model import ApprovalRequest

    return ApprovalRequest(approver=approver)


def test_a_canary_that_waits_for_approval_is_reported_once(night: HookedNight, receiver: Receiver) -> None:
    night.vms("db", "web")
    hook = {"url": receiver.url, "secret": SECRET, "events": ["canary_waits"]}
    made = night.waves.create(wave({"id": "db"}, {"id": "web"}, hooks=[hook], canary={"count": 1, "gate": "approval"}))
    night.waves.go(made.id)
    night.until(made.id, lambda _: len(receiver.got) == 1)
    for _ in range(3):
        night.carrying.tick()
    assert [one.event for one in night.deliveries(made.id)] == ["canary_waits"]


def test_a_server_that_is_down_is_asked_again_with_growing_pauses_by_any_host(night: HookedNight, receiver: Receiver) -> None:
    made = night.hooked({"url": receiver.url, "secret": SECRET})
    night.waves.go(made.id)
    receiver.answers = [503] * 15
    pauses = []
    for attempt in range(1, 16):
        night.anew(LOCAL)  # nothing but the rows says how often it was tried
        seen = night.sent()
        assert (seen.state, seen.attempts, seen.answer) == (PENDING, attempt, "127.0.0.1 answers 503")
        assert night.store.wave_hooks.due(limit=1) == [], "not before its pause is over"
        pauses.append(seen.next_at - seen.made_at)
        night.pauses_are_over()
    assert pauses[0] >= FIRST_PAUSE_S
    assert pauses[3] > 2 * FIRST_PAUSE_S
    assert pauses[-1] >= LONGEST_PAUSE_S
    night.pauses_are_over()
    assert night.sent().state == DELIVERED
    assert len({body for _, body in receiver.got}) == 1, "the same bytes each time"
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1


def test_a_server_that_accepts_nothing_keeps_no_other_from_its_deliveries(night: HookedNight, receiver: Receiver) -> None:
    """Its thousands of deliveries stood before those of all others, also of a required webhook that a wave waits for."""
    silent = night.hooked({"url": "http://127.0.0.1:1/", "secret": SECRET})
    (hook,) = silent.hooks
    refused = [NewDelivery(hook.id, "member_failed", "{}")] * 500
    with night.store.wave_hooks._writing() as db:
        add_deliveries(db, silent.id, refused)
    made = night.hooked({"url": receiver.url, "secret": SECRET})
    night.waves.go(made.id)
    for _ in range(2):
        night.delivering.look()
        until(lambda: not night.delivering._sending)
    assert [body["event"] for body in receiver.bodies] == ["wave_began"]


def test_a_sender_that_dies_after_it_took_a_delivery_leaves_it_to_the_next(night: HookedNight, receiver: Receiver) -> None:
    made = night.hooked({"url": receiver.url, "secret": SECRET})
    night.waves.go(made.id)
    (one,) = night.store.wave_hooks.due(limit=5)
    assert night.store.wave_hooks.take(one, pause_s=60)
    assert not night.store.wave_hooks.take(one, pause_s=60), "two never send at the same time"
    assert night.store.wave_hooks.due(limit=5) == []
    night.pauses_are_over()
    assert night.sent().state == DELIVERED


def test_two_hosts_send_the_events_of_a_webhook_one_after_the_other(night: HookedNight, receiver: Receiver) -> None:
    """All hosts send: while one waits for an answer, another sent the next event, which came first."""
    made = night.hooked({"url": receiver.url, "secret": SECRET})
    (hook,) = made.hooks
    other, rows = night.anew(LOCAL), night.store.wave_hooks
    night.waves.go(made.id)
    rows.add_once(made.id, [NewDelivery(hook.id, "wave_held", json.dumps({"event": "wave_held"}))])
    began, held = rows.due(limit=5)
    assert rows.take(began, pause_s=60)
    other.look()
    until(lambda: not other._sending)
    assert not rows.take(held, pause_s=60), "nor one that it found before"
    other._send(hook.id, [began, held])
    assert (receiver.bodies, rows.due(limit=5)) == ([], [])
    rows.settle(began.number, state=DELIVERED, answer="204")
    other.look()
    until(lambda: [one.state for one in night.deliveries(made.id)] == [DELIVERED, DELIVERED])
    assert [body["event"] for body in receiver.bodies] == ["wave_held"]


def test_one_that_was_not_accepted_holds_up_no_later_one(night: HookedNight, receiver: Receiver) -> None:
    """A server may refuse one event for a day. Those that are due go in their order, whatever clock made them."""
    made = night.hooked({"url": receiver.url, "secret": SECRET})
    (hook,) = made.hooks
    night.waves.go(made.id)
    receiver.answers = [503]
    assert night.sent().state == PENDING
    with night.store.wave_hooks._writing() as db:
        add_deliveries(db, made.id, [NewDelivery(hook.id, event, json.dumps({"event": event})) for event in ("1", "2")])
        db.execute(update(wave_deliveries).where(wave_deliveries.c.event == "1").values(next_at=time.time() + 60))
    night.delivering.look()
    until(lambda: not night.delivering._sending)
    assert [body["event"] for body in receiver.bodies] == ["wave_began", "1", "2"]
    assert night.deliveries(made.id)[0].answer == "127.0.0.1 answers 503"


@pytest.mark.parametrize("status", [404, 302])
def test_what_no_other_attempt_would_repair_is_given_up_and_stops_nothing(
    night: HookedNight, receiver: Receiver, status: int
) -> None:
    made = night.hooked({"url": receiver.url, "secret": SECRET})
    night.waves.go(made.id)
    receiver.answers = [status]
    assert (night.sent().state, len(receiver.got)) == (GIVEN_UP, 1), "and no redirect is followed"
    assert night.waves.whole(made.id).state is WaveState.RUNNING
    again = night.store.wave_hooks.again(made.id, night.deliveries(made.id)[0].number)
    assert (again.state, night.sent().state) == (PENDING, DELIVERED)


def test_a_wave_waits_for_a_required_webhook_and_is_held_when_that_is_given_up(night: HookedNight, receiver: Receiver) -> None:
    night.vms("db")
    made = night.hooked({"url": receiver.url, "secret": SECRET, "required": True, "events": ["wave_began"]})
    night.waves.go(made.id)
    receiver.answers = [503, 503]
    night.until(made.id, lambda _: len(receiver.got) == 1)
    waits = night.until(made.id, lambda seen: "503" in (seen.members[0].waits_for or ""))
    assert "A required webhook has not accepted wave_began yet" in (waits.members[0].waits_for or "")
    assert waits.members[0].state is MemberState.WAITING
    night.pauses_are_over(made_at=0)
    held = night.until(made.id, lambda seen: seen.state is WaveState.HELD)
    assert "did not accept wave_began: 127.0.0.1 answers 503" in (held.reason or "")
    night.waves.go(made.id)
    done = night.until(made.id, lambda seen: seen.state is WaveState.COMPLETED)
    assert done.hooks[0].required is False, "who let it go on knew of it"


def test_a_required_webhook_that_is_given_up_while_its_wave_is_held_is_not_waited_for_again(
    night: HookedNight, receiver: Receiver
) -> None:
    night.vms("db")
    made = night.hooked({"url": receiver.url, "secret": SECRET, "required": True, "events": ["wave_began"]})
    night.waves.go(made.id)
    receiver.answers = [503, 503]
    night.until(made.id, lambda _: len(receiver.got) == 1)
    night.waves.hold(made.id)
    night.pauses_are_over(made_at=0)
    held = night.until(made.id, lambda seen: not seen.hooks[0].required)
    assert held.state is WaveState.HELD
    assert (held.reason or "").endswith("127.0.0.1 answers 503. It is not waited for again.")


def test_a_webhook_goes_only_where_the_guard_allows(night: HookedNight, receiver: Receiver) -> None:
    made = night.hooked({"url": receiver.url, "secret": SECRET})
    night.waves.go(made.id)
    night.anew(Guard())
    assert "not among the hosts" in (night.sent().answer or "")
    night.pauses_are_over(made_at=0)
    assert night.sent().state == GIVEN_UP
    assert receiver.got == []
    assert GIVEN_UP_AFTER_S > 3600


def test_what_is_secret_is_sealed_and_is_sealed_again_with_the_key(night: HookedNight, receiver: Receiver) -> None:
    made = night.hooked({"url": receiver.url, "secret": SECRET})
    night.waves.go(made.id)
    with night.store.wave_hooks._reading() as db:
        before = db.execute(select(wave_hooks.c.sealed)).scalar_one()
    plain = (SECRET.encode(), b"secret/path")
    assert not any(one in before for one in plain)
    assert not any(one in file.read_bytes() for file in night.house.folder.glob("store.db*") for one in plain)
    sources = Sources(night.store.sources, night.keyring, host="local", platforms={}, folder=night.house.folder / "sources")
    sources.rotate_key()
    with night.store.wave_hooks._reading() as db:
        assert db.execute(select(wave_hooks.c.sealed)).scalar_one() != before
    night.keyring = Keyring(night.house.folder / "migrator.key")
    night.anew(LOCAL)
    assert night.sent().state == DELIVERED
    night.waves.cancel(made.id)
    night.waves.remove(made.id)
    with night.store.wave_hooks._reading() as db:
        assert (db.execute(select(wave_hooks)).all(), db.execute(select(wave_deliveries)).all()) == ([], [])


def test_a_draft_that_is_replaced_has_other_webhooks_or_keeps_its_own(night: HookedNight, receiver: Receiver) -> None:
    made = night.hooked({"url": receiver.url, "secret": SECRET})
    kept = night.waves.replace(made.id, wave({"id": "web"}), keeps_hooks=True)
    assert kept.hooks == made.hooks
    other = night.waves.replace(made.id, wave({"id": "web"}, hooks=[{"url": receiver.url, "secret": SECRET}]))
    assert other.hooks[0].id != made.hooks[0].id
    night.waves.go(made.id)
    assert (night.sent().state, len(receiver.got)) == (DELIVERED, 1)


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """A folder that another user reaches too; a test's own is closed to all others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


def test_a_command_of_the_settings_gets_the_event_and_few_rights(night: HookedNight, anybodys: Path) -> None:
    output = anybodys / "output"
    script = f'printf %s "$SYNVIRT_HOOK_BODY" > {output}; cat /proc/self/status >> {output}'
    night.commands["note"] = WaveCommandSetting(argv=("sh", "-c", script))
    night.anew(LOCAL)
    made = night.hooked({"command": "note"})
    night.waves.go(made.id)
    assert night.sent().answer == "sh ended with 0"
    text = output.read_text()
    assert json.JSONDecoder().raw_decode(text)[0]["event"] == "wave_began"
    assert "NoNewPrivs:\t1" in text
    if os.geteuid() == 0:
        assert "Uid:\t0" not in text


def test_a_command_that_fails_or_takes_too_long_is_run_again(night: HookedNight) -> None:
    night.commands["slow"] = WaveCommandSetting(argv=("sleep", "600"), timeout_s=0.5)
    night.commands["bad"] = WaveCommandSetting(argv=("false",))
    night.anew(LOCAL)
    made = night.hooked({"command": "slow"}, {"command": "bad"})
    night.waves.go(made.id)
    answers = {night.sent().answer, night.sent().answer}
    assert any("took too long" in (one or "") for one in answers)
    assert any("ended with 1" in (one or "") for one in answers)
    assert {one.state for one in night.deliveries(made.id)} == {PENDING}
    assert confined(night.commands["bad"])[-2:] == ["--", "false"]


def test_a_command_that_takes_long_is_not_run_by_another_host_meanwhile(
    night: HookedNight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hosts send: one that finds it due runs it, beside the first."""
    limit_s, due = 600.0, list[float]()

    def slow(*_: object, **__: object) -> None:
        (one,) = night.deliveries(made.id)
        due.append(one.next_at - time.time())
        raise Internal("it found nobody at home")

    monkeypatch.setattr(programs, "run", slow)
    night.commands["slow"] = WaveCommandSetting(argv=("true",), timeout_s=limit_s)
    night.anew(LOCAL)
    made = night.hooked({"command": "slow"})
    night.waves.go(made.id)
    sent = night.sent()
    assert due[0] > limit_s
    assert sent.state == PENDING
    assert sent.next_at - time.time() <= FIRST_PAUSE_S, "it is run again soon, as it has ended"


@pytest.mark.parametrize(("attempts", "ahead_s"), [(0, 60.0), (1, 2 * 86400.0)])
def test_a_clock_that_was_ahead_puts_no_delivery_off(night: HookedNight, attempts: int, ahead_s: float) -> None:
    """A required one would stop its wave until the clock is there again, and nobody can send what is pending."""
    night.commands["bad"] = WaveCommandSetting(argv=("false",))
    night.anew(LOCAL)
    made = night.hooked({"command": "bad", "required": True})
    night.waves.go(made.id)
    then = time.time() + ahead_s
    with night.store.wave_hooks._writing() as db:
        db.execute(update(wave_deliveries).values(made_at=then, next_at=then, attempts=attempts))
    sent = night.sent()
    assert (sent.attempts, sent.state, sent.made_at <= time.time()) == (attempts + 1, PENDING, True)
    assert night.store.wave_hooks.due(limit=5) == [], "its pause is counted by the right clock"


def test_a_webhook_for_which_there_is_no_thread_now_is_sent_later(
    night: HookedNight, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crowded(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    made = night.hooked({"url": receiver.url, "secret": SECRET})
    night.waves.go(made.id)
    with monkeypatch.context() as no_memory:
        no_memory.setattr(night.delivering._pool, "submit", crowded)
        night.delivering.look()
    night.delivering.look()
    until(lambda: [one.state for one in night.deliveries(made.id)] == [DELIVERED])


def test_an_error_that_nobody_expected_gives_a_webhook_up_in_time_too(
    night: HookedNight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a wave would wait for it for ever, and nobody would be told why."""

    def crowded(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(programs, "run", crowded)
    night.commands["note"] = WaveCommandSetting(argv=("true",))
    night.anew(LOCAL)
    made = night.hooked({"command": "note", "required": True})
    night.waves.go(made.id)
    assert ((sent := night.sent()).state, sent.answer) == (PENDING, "OSError: Cannot allocate memory")
    night.pauses_are_over(made_at=0)
    assert night.sent().state == GIVEN_UP
    assert night.waves.whole(made.id).state is WaveState.HELD


def test_a_host_without_the_command_gives_the_cause_of_the_host_that_ran_it(night: HookedNight) -> None:
    """A wave that is held for «no settings have the command» would send its operator to the wrong place."""
    night.commands["bad"] = WaveCommandSetting(argv=("false",))
    night.anew(LOCAL)
    made = night.hooked({"command": "bad", "required": True})
    night.waves.go(made.id)
    assert night.sent().state == PENDING
    night.commands.clear()
    night.pauses_are_over(made_at=0)
    assert ((sent := night.sent()).state, "ended with 1" in (sent.answer or "")) == (GIVEN_UP, True)


def test_the_webhooks_of_a_wave_that_a_later_version_wrote_are_left_to_a_host_that_reads_it(
    night: HookedNight, receiver: Receiver
) -> None:
    """Before, a host that was not upgraded yet gave up a required one: it was never sent, and its wave went on."""
    made = night.hooked({"url": receiver.url, "secret": SECRET, "required": True})
    night.waves.go(made.id)
    with night.store.wave_hooks._writing() as db:
        db.execute(update(waves).where(waves.c.id == str(made.id)).values(version="9.0"))
    night.pauses_are_over(made_at=0)
    assert (night.sent().state, receiver.got) == (PENDING, [])
    with night.store.wave_hooks._writing() as db:
        db.execute(update(waves).where(waves.c.id == str(made.id)).values(version=VERSION))
    assert night.sent().state == DELIVERED
