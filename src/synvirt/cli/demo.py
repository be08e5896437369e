"""`synvirt demo`: a whole migration of a sample that it makes, over the same HTTP interface as for everyone.

    sample OVA ─▶ POST /migrations ─▶ the stream, until Completed ─▶ ask the guest which disk it runs from ─▶ tidy up

The service runs in this process, so that there is one thing to stop.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Protocol
from uuid import UUID, uuid4

import typer

from synvirt.cli.migrating.watching import display, verdict, watch
from synvirt.cli.program import INTERRUPTED, shown
from synvirt.errors import Conflict, GuestBootFailed
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, OfflineKind, State
from synvirt.model.plan import MigrationPlan, PlanSource, Target
from synvirt.sizes import sized

if TYPE_CHECKING:
    from synvirt.cli.client import Client
    from synvirt.sample import Sample
    from synvirt.settings import Settings

SERVICE_START_TIMEOUT_S = 30


class RunningService(Protocol):
    """What the demo uses of the service that it starts: that of main/."""

    @property
    def address(self) -> str: ...
    def run(self, *, on_ready: Callable[[], None]) -> None: ...
    def stop(self) -> None: ...
    def read_guest_file(self, uuid: UUID, path: str) -> bytes: ...
    def remove(self, job: Migration) -> None: ...


StartService = Callable[["Settings"], AbstractContextManager[RunningService]]


def demo(start: StartService, settings: "Settings", *, payload_mib: int, stay: bool) -> bool:
    """True, if the sample ended as a running guest. `stay`: leave service and guest running until Ctrl-C. After an earlier
    Ctrl-C it removes what it has made, and raises typer.Exit."""
    try:
        return _demo(start, settings, payload_mib=payload_mib, stay=stay)
    except KeyboardInterrupt:
        say("Interrupted: no guest, volume or job of the demonstration is left")
        raise typer.Exit(INTERRUPTED) from None


def _demo(start: StartService, settings: "Settings", *, payload_mib: int, stay: bool) -> bool:
    from synvirt.cli.client import Client

    say("Making a sample appliance: Debian's kernel, busybox and the QEMU guest agent on a disk that boots by itself")
    with start(settings) as service, Client.local(settings.socket_path, base_url=settings.base_url) as client:
        sample = _sample(settings, payload_mib)
        server = threading.Thread(target=_serve, args=(service, ready := threading.Event()), name="service")
        try:
            say(f"  {sample.ova.name}: {sized(sample.ova.stat().st_size)} for a disk of {sized(sample.capacity_bytes)}")
            server.start()
            if not ready.wait(SERVICE_START_TIMEOUT_S):
                return False
            say(f"The service runs at {service.address}")
            return _moved(service, client, sample, stay=stay)
        finally:
            service.stop()
            with suppress(RuntimeError):  # Ctrl-C came before it was started
                server.join()
            sample.ova.unlink(missing_ok=True)


def _sample(settings: "Settings", payload_mib: int) -> "Sample":
    from synvirt.sample import build

    # A name of its own: a killed demo may have left its guest.
    return build(settings.imports_dir, payload_mib=payload_mib, name=f"synvirt-demo-{uuid4().hex[:6]}")


def _serve(service: RunningService, ready: threading.Event) -> None:
    service.run(on_ready=ready.set)


def _moved(service: RunningService, client: "Client", sample: "Sample", *, stay: bool) -> bool:
    """Whether the sample ended as a running guest. After Ctrl-C its job is cancelled, or its guest removed; then
    KeyboardInterrupt."""
    try:
        job = _migrate(client, sample)
        done = verdict(job)
        if done:
            try:
                _prove(service, job, sample)
                _summary(job)
                if stay:
                    _stay(service)
            finally:
                say("Stopping the guest and removing its volume: this was a demonstration")
                service.remove(job)
    except KeyboardInterrupt:  # also between the job's end and the removal
        _tidy(service, client, sample)
        raise
    return done


def _migrate(client: "Client", sample: "Sample") -> Migration:
    """The job at its end."""
    plan = MigrationPlan.model_validate(
        {
            "source": PlanSource(Offline=OfflineKind.OVA_ARCHIVE),
            "source_ref": {"kind": "offline_host_path", "path": str(sample.ova)},
            "mode": Mode.COLD,
            "target": Target(name=sample.ova.stem),
        }
    )
    job = client.submit(plan)
    say(f"Submitted migration {job.id}")
    with display(quiet=False) as show:
        return watch(client, job, show=show)


def _tidy(service: RunningService, client: "Client", sample: "Sample") -> None:
    """Ends the sample's job, which may have been submitted without an answer yet, and removes its guest."""
    say("Cancelling: nothing of the job will be left")
    for item in json.loads(client.ask("GET", "/migrations", params={"name": sample.ova.stem}))["items"]:
        with suppress(Conflict):  # it has ended meanwhile
            client.cancel(item["id"])
        with display(quiet=True) as show:
            ended = watch(client, client.migration(item["id"]), show=show)
        if ended.state is not State.CANCELLED:  # a guest that was interrupted as it booted has failed, which keeps its volume
            service.remove(ended)


def _prove(service: RunningService, job: Migration, sample: "Sample") -> None:
    """Asks the guest's agent: the id of the file system that it runs from must be the id of the disk that we made."""
    from synvirt.sample import ID_PATH

    if job.domain is None:
        raise GuestBootFailed("the job ended without a domain")
    found = service.read_guest_file(UUID(job.domain.uuid), ID_PATH).decode(errors="replace").strip()
    if found != sample.id:
        raise GuestBootFailed(f"the guest says that it is sample {found!r}, and not {sample.id}")
    say(f"The guest answers: it runs from its new disk, sample {found}")


def _summary(job: Migration) -> None:
    moved, took = sum(one.bytes for one in job.passes), sum(one.seconds for one in job.passes)
    capacity = sum(disk.capacity_bytes for disk in job.manifest.disks) if job.manifest else 0
    rate = f", {sized(moved / took)}/s" if took else ""
    say(f"Moved {sized(moved)} of data, a disk of {sized(capacity)}, in {took:.1f} s{rate}; checksums verified on the way")
    for disk in job.disks:
        say(f"  disk {disk.label} ─▶ volume {disk.volume}")
    if job.domain is not None:
        say(f"  domain {job.domain.name} ({job.domain.uuid}), seen to boot by: {job.boot_sign}")
    say("State history:")
    for visit, left_at in zip(job.history, [*(one.at for one in job.history[1:]), None], strict=True):
        say(f"  {_clock(visit.at)}  {visit.state:<12}{_lasted(visit.at, left_at)}")


def _clock(moment: datetime) -> str:
    return moment.astimezone().strftime("%H:%M:%S")


def _lasted(since: datetime, until: datetime | None) -> str:
    return "" if until is None else f"  {(until - since).total_seconds():6.1f} s"


def _stay(service: RunningService) -> None:
    say("")
    say(f"The service goes on at {service.address}; its jobs: synvirt migrations list")
    say("Stop it, and the guest, with Ctrl-C.")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        say("")


def say(text: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(f"{shown(text)}\n")
    sys.stdout.flush()
