"""A rehearsal while it is under way: what its steps share. Blocking code."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import structlog

from synvirt.errors import Cancelled, HostLacks, NotFound, SynvirtError
from synvirt.jobs.stop import Stop
from synvirt.migrations.job import Job
from synvirt.migrations.patience import HERE
from synvirt.migrations.rooms import Rooms
from synvirt.model.job import BootAttempt
from synvirt.model.machine import Nic
from synvirt.model.rehearsal import CheckResult, Rehearsal
from synvirt.proof.health import Checker
from synvirt.rehearsals.network import Bubble, GuestInBubble, InBubble, Network, NoNetwork
from synvirt.rehearsals.together import Networks, others

log = structlog.get_logger(__name__)

# A request to cancel is a row of the store, and any host's API may write it.
WISH_POLL_S = 1.0
# The others' jobs may still be copying. A guest that waits for longer holds memory for nobody.
OTHERS_WITHIN_S = 24 * 3600.0
# How long a step is tried again while this host's libvirtd or the destination is away, and the pause before each try.
AWAY_S, AWAY_PAUSE_S = 1800.0, 2.0


class LetGo(Exception):
    """This process has to stop working, as in a crash."""


class NotYet(Exception):
    """What the step waits for has not happened: the step runs again in a moment."""


@dataclass
class UnderWay:
    """A rehearsal while a step of it runs. `rehearsal` is equal to the store's row; every change goes through `move`. `let_go`:
    this process has lost its lease, or ends."""

    rehearsal: Rehearsal
    rooms: Rooms
    ca_file: Path | None
    screens: Path
    let_go: Event = field(default_factory=Event)
    # Makes a network for these cards; None: guests are rehearsed without one.
    begin_network: Callable[[Sequence[Nic]], Bubble] | None = None
    network: Network | None = None
    networks: Networks | None = None
    # How many networks have ended under the guest.
    networks_lost: int = 0
    # The rungs of the ladder up to the one that the guest booted from.
    tried: tuple[BootAttempt, ...] = ()
    # Since when a step waits for the others of its group, by the monotonic clock; and what was found before it waited.
    waits_since: float | None = None
    found: Mapping[str, object] | None = None
    # Since when a step meets that something here is away.
    away_since: float | None = None
    _asked_at: float = 0.0
    _cancelled: bool = False

    @property
    def job(self) -> Job:
        return Job(self.rooms.store.get(self.rehearsal.migration_id), self.rooms, Stop())

    def move(self, **changes: object) -> None:
        """Writes these fields of the rehearsal. Conflict, if its state has changed meanwhile."""
        rows, before = self.rooms.store.rehearsals, self.rehearsal
        self.rehearsal = rows.change(before.id, before.state, lambda found: found.model_copy(update=changes))

    def stop(self) -> bool:
        """Whether programs that run for it must stop. Never raises, as code that ends programs calls it."""
        return self.let_go.is_set() or self.cancelled()

    def cancelled(self, *, anew: bool = False) -> bool:
        """Whether an operator or the job asked for its end. `anew`: a request of this very moment counts."""
        if not self._cancelled and (anew or time.monotonic() - self._asked_at >= WISH_POLL_S):
            self._cancelled = self.rooms.store.rehearsals.is_cancelled(self.rehearsal.id)
            self._asked_at = time.monotonic()
        return self._cancelled

    def check(self, *, anew: bool = False) -> None:
        """Cancelled, LetGo. `anew`: as above."""
        if self.let_go.is_set():
            raise LetGo
        if self.cancelled(anew=anew):
            raise Cancelled

    def pause(self, seconds: float) -> None:
        """Waits for this many seconds. LetGo, if the service ends meanwhile."""
        if self.let_go.wait(seconds):
            raise LetGo

    def renew_network(self, cards: Sequence[Nic]) -> CheckResult:
        """A new network for the next guest. If this host cannot give it one, its cards have no cable."""
        self.close()
        if self.begin_network is None:
            return CheckResult(name="network", ok=True, detail="none: there is no cable in its cards")
        try:
            self.network = self._shared() or self.begin_network(cards)
        except HostLacks as error:
            self.begin_network = None
            return CheckResult(name="network", ok=True, detail=f"none: {error.detail}")
        whose = (
            "one of its own" if self.rehearsal.together is None else f"that of {len(self.rehearsal.together.rehearsals)} guests"
        )
        return CheckResult(name="network", ok=True, detail=f"{whose}, which is isolated")

    def _shared(self) -> Network | None:
        """The network of guests that are rehearsed together, with all their cards, as their jobs have them."""
        if self.rehearsal.together is None or self.networks is None:
            return None
        cards: list[Sequence[Nic]] = []
        for one in self.rehearsal.together.rehearsals:
            try:
                job = self.rooms.store.get(self.rooms.store.rehearsals.get(one).migration_id)
            except NotFound:  # it had ended, and was removed with its job
                cards.append(())
            else:
                cards.append(() if job.manifest is None else job.manifest.nics)
        return self.networks.join(self.rehearsal, cards)

    def wait_for(self, happened: Callable[[Sequence[Rehearsal]], bool]) -> None:
        """Returns if `happened` is true of the other guests, or has not become true within OTHERS_WITHIN_S. Else NotYet,
        Cancelled, LetGo."""
        if self.waits_since is None:
            self.waits_since = time.monotonic()
        if not happened(others(self.rooms.store, self.rehearsal)):
            self.check()
            if time.monotonic() - self.waits_since < OTHERS_WITHIN_S:
                raise NotYet
            log.warning("a rehearsal goes on without the others of its group", rehearsal=str(self.rehearsal.id))
        self.waits_since = None

    def waits_out(self, trouble: SynvirtError) -> bool:
        """Whether the step that met this trouble is tried again, after a pause: if something here is away, and has not been for
        AWAY_S. It is shown meanwhile. LetGo."""
        if not isinstance(trouble, HERE):
            return False
        if self.away_since is None:
            self.away_since = time.monotonic()
            log.warning("what a rehearsal needs is away", rehearsal=str(self.rehearsal.id), cause=trouble.detail)
            shown = type(trouble)(f"{trouble.detail.rstrip('.')}. It is tried again", hint=trouble.hint)
            self.move(error=self.job.problem(shown, fatal=False))
        if time.monotonic() - self.away_since >= AWAY_S:
            return False
        self.pause(AWAY_PAUSE_S)
        return True

    def checks_by(self) -> Checker:
        """Runs the checks in the guest's network."""
        if self.network is None:
            return Checker(NoNetwork(self.rooms.hypervisor), InBubble())
        return Checker(GuestInBubble(self.rooms.hypervisor, self.network), InBubble(bubble=self.network), self.ca_file)

    def close(self) -> None:
        """Leaves the network. It ends when the last guest leaves."""
        if self.network is not None:
            self.network.close()
        self.network = None

    @property
    def screen(self) -> Path:
        return self.screens / f"{self.rehearsal.id}.png"
