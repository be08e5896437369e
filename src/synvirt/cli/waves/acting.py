"""Actions on a wave, a member, or a delivery."""

import json
from typing import Annotated, Any

import typer

from synvirt.cli.listing import id_of, segment
from synvirt.cli.options import Options, confirm, with_options
from synvirt.cli.program import shown
from synvirt.cli.waves.asking import WAVES, MemberName, WaveName

Sure = Annotated[bool, typer.Option("--yes", help="Do not ask")]


@with_options
def go(options: Options, wave: WaveName) -> None:
    """Start a draft, or continue a held wave.

    Example: synvirt waves go november
    """
    _act(options, wave, "go")


@with_options
def hold(options: Options, wave: WaveName) -> None:
    """Hold a wave: nothing new begins; copies and cut-overs under way go on.

    Example: synvirt waves hold november
    """
    _act(options, wave, "hold")


@with_options
def cancel(options: Options, wave: WaveName, sure: Sure = False) -> None:
    """End a wave: what waits is skipped, what runs is cancelled and its source powered on again.

    Example: synvirt waves cancel november --yes
    """
    confirm(options, f"Cancel wave {wave}?", sure=sure)
    _act(options, wave, "cancel")


@with_options
def roll_back(
    options: Options,
    wave: WaveName,
    members: Annotated[list[str] | None, typer.Argument(metavar="[MEMBER]...", help="Their ids; none: all")] = None,
    sure: Sure = False,
) -> None:
    """Roll back a member, or all: guests here are stopped, sources powered on, copies kept.

    What they wrote here since their cut-over is in their copies only. Example: synvirt waves roll-back november db01
    """
    confirm(options, f"Roll back {', '.join(members) if members else 'all members'} of {wave}?", sure=sure)
    _act(options, wave, "roll-back", {"members": members or []})


@with_options
def approve(
    options: Options,
    wave: WaveName,
    approver: Annotated[
        str | None, typer.Argument(metavar="[APPROVER]", help="The approver's name, as members have it")
    ] = None,
    *,
    member: Annotated[list[str] | None, typer.Option(help="Only for this member; may be given again")] = None,
    canary: Annotated[bool, typer.Option("--canary", help="The canary is healthy: the others continue")] = False,
) -> None:
    """Approve members that wait for it, or let the others go on after the canary.

    Example: synvirt waves approve november "database team"
    """
    body = {"canary": True} if canary else {"approver": approver, "members": member or []}
    _act(options, wave, "approve", body)


@with_options
def skip(options: Options, wave: WaveName, member: MemberName) -> None:
    """Skip a member. Its job is cancelled.

    Example: synvirt waves skip november web07
    """
    _of_member(options, wave, member, "skip")


@with_options
def retry(
    options: Options,
    wave: WaveName,
    members: Annotated[list[str] | None, typer.Argument(metavar="[MEMBER]...", help="Their ids in the wave")] = None,
    *,
    failed: Annotated[bool, typer.Option("--failed", help="All members that failed")] = False,
) -> None:
    """Retry members that failed, were skipped or rolled back.

    Example: synvirt waves retry november web07
    """
    if failed == bool(members):
        raise typer.BadParameter("name the members, or give --failed for all that failed", param_hint="[MEMBER]...")
    if members is not None and len(members) == 1:
        _of_member(options, wave, members[0], "retry")
    else:
        _act(options, wave, "retry", {"members": members or []})


@with_options
def deliver_again(
    options: Options,
    wave: WaveName,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="As `synvirt waves deliveries` lists it")],
) -> None:
    """Send a delivery again that was given up.

    Example: synvirt waves deliver-again november 17
    """
    with options.connect() as client:
        answer = client.ask("POST", f"{WAVES.path}/{id_of(client, WAVES, wave)}/deliveries/{number}/again")
    print(answer if options.json else f"Delivery {number} is sent again")


@with_options
def remove(options: Options, wave: WaveName) -> None:
    """Remove a draft, or a wave that has ended. Its jobs stay.

    Example: synvirt waves remove november
    """
    with options.connect() as client:
        id_ = id_of(client, WAVES, wave)
        client.ask("DELETE", f"{WAVES.path}/{id_}")
    if not options.json:
        print(f"Wave {id_} is removed")


def _act(options: Options, wave: str, action: str, body: Any = None) -> None:
    with options.connect() as client:
        answer = client.ask("POST", f"{WAVES.path}/{id_of(client, WAVES, wave)}/{action}", json=body)
    found = json.loads(answer)
    print(answer if options.json else shown(f"Wave {found['name']} is {found['state']}"))


def _of_member(options: Options, wave: str, member: str, action: str) -> None:
    with options.connect() as client:
        answer = client.ask("POST", f"{WAVES.path}/{id_of(client, WAVES, wave)}/members/{segment(member)}/{action}")
    print(answer if options.json else shown(f"{member} is {json.loads(answer)['state']}"))
