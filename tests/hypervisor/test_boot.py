"""What counts as a boot, and what as the end of hope: judged on invented observations, so no test waits."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.hypervisor.boot import AGENT_GRACE_S, QUIET_S, RESETS_MAX, RUNNING_SETTLE_S, Check, Lost, Seen, Watch

TIMEOUT_S, ACTIVITY_S = 300.0, 30.0
PROMPT = "Debian GNU/Linux 12 web ttyS0\nweb login:"
PANIC = "---[ end Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0) ]---"


def watched(look: Callable[[float], Seen], check: Check = "any", *, step_s: float = 0.5) -> tuple[str | Lost, float]:
    """What the watch says of a guest that looks so at each moment, and when."""
    watch, at_s = Watch(check, TIMEOUT_S, ACTIVITY_S), 0.0
    while at_s < 2 * TIMEOUT_S:
        verdict = watch.judge(look(at_s))
        if verdict is not None:
            return verdict, at_s
        at_s += step_s
    raise AssertionError("a watch ends when its time is over")


def lost(look: Callable[[float], Seen], check: Check = "any") -> tuple[Lost, float]:
    verdict, at_s = watched(look, check)
    assert isinstance(verdict, Lost)
    return verdict, at_s


@pytest.mark.parametrize("check", ["any", "agent", "running"])
def test_an_agent_is_a_sign_at_once(check: Check) -> None:
    assert watched(lambda at: Seen(at, agent=at >= 3), check) == ("agent", 3)


@pytest.mark.parametrize("check", ["any", "agent"])
def test_a_login_prompt_is_a_sign_when_no_agent_follows(check: Check) -> None:
    sign = watched(lambda at: Seen(at, console=PROMPT if at >= 20 else "starting"), check)
    assert sign == ("console", 20 + AGENT_GRACE_S)
    assert watched(lambda at: Seen(at, console=PROMPT, agent=at >= 5), check) == ("agent", 5)


def test_running_is_enough_where_the_setting_says_so() -> None:
    assert watched(Seen, "running") == ("running", RUNNING_SETTLE_S)


def test_a_guest_that_writes_again_and_again_has_booted() -> None:
    assert watched(lambda at: Seen(at, requests=int(10 * at), writes=int(at / 3))) == ("activity", ACTIVITY_S)


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(Seen, id="silent"),
        pytest.param(lambda at: Seen(at, requests=int(at * 50)), id="reads only, as a boot loader does"),
        pytest.param(lambda at: Seen(at, writes=min(int(at), 20)), id="wrote at first and never again"),
        pytest.param(lambda at: Seen(at, writes=int(at / 20)), id="writes too seldom"),
    ],
)
def test_less_than_that_is_no_sign(look: Callable[[float], Seen]) -> None:
    verdict, at_s = lost(look)
    assert "no sign of life within 300 s" in verdict.trouble
    assert at_s == TIMEOUT_S
    assert verdict.other_bus_may_help


@pytest.mark.parametrize("check", ["agent", "running"])
def test_activity_counts_only_where_the_setting_lets_it(check: Check) -> None:
    assert watched(lambda at: Seen(at, writes=int(at)), check)[0] != "activity"


def test_a_guest_that_restarts_while_it_writes_has_not_booted() -> None:
    verdict, _ = lost(lambda at: Seen(at, writes=int(at), requests=int(at), resets=int(at / 25)))
    assert "restarts again and again" in verdict.trouble


def test_a_reset_loop_ends_early() -> None:
    verdict, at_s = lost(lambda at: Seen(at, resets=int(at / 2), console="Booting from Hard Disk..."))
    assert "restarts again and again" in verdict.trouble
    assert at_s == 2 * RESETS_MAX
    assert verdict.other_bus_may_help


def test_an_installed_guest_may_restart_on_its_first_start() -> None:
    assert watched(lambda at: Seen(at, resets=min(int(at / 20), 2), agent=at >= 90)) == ("agent", 90)


def test_a_guest_that_says_why_it_failed_and_is_still_has_ended() -> None:
    verdict, at_s = lost(lambda at: Seen(at, console=PANIC if at >= 12 else f"[{at}] booting", requests=min(int(at), 12)))
    assert verdict.cause is not None
    assert "root file system" in verdict.cause.cause
    assert verdict.other_bus_may_help
    assert at_s == 12 + QUIET_S


def test_what_the_screen_says_counts_as_the_console_does() -> None:
    verdict, _ = lost(lambda at: Seen(at, screen="*** STOP: 0x0000007B"))
    assert verdict.cause is not None
    assert "0x7B" in verdict.cause.cause
    assert verdict.other_bus_may_help


def test_a_guest_that_waits_for_its_disk_is_given_time() -> None:
    waiting = "Begin: Waiting for root file system ..."
    assert watched(lambda at: Seen(at, console=waiting, agent=at >= 60)) == ("agent", 60)
    verdict, at_s = lost(lambda at: Seen(at, console=waiting))
    assert at_s == TIMEOUT_S
    assert verdict.cause is not None, "but it is the cause when the time is over"


def test_a_guest_that_waits_for_a_disk_shows_no_sign_by_what_it_writes_meanwhile() -> None:
    """systemd gives up after 90 s: then it is in emergency mode, or goes on."""
    waits, gave_up = "[ ***  ] Job dev-sdb1.device/start running (1min / 1min 30s)", "You are in emergency mode."
    verdict, at_s = lost(lambda at: Seen(at, writes=int(at), console=waits if at < 95 else gave_up))
    assert verdict.cause is not None
    assert "emergency" in verdict.cause.cause
    assert at_s < 95 + QUIET_S + 1
    goes_on = "[DEPEND] Dependency failed for /data\n[  OK  ] Started the web server"
    assert watched(lambda at: Seen(at, writes=int(at), console=waits if at < 95 else goes_on)) == ("activity", 95)


def test_no_boot_device_is_so_on_any_bus() -> None:
    verdict, _ = lost(lambda at: Seen(at, console="Boot failed: not a bootable disk\nNo bootable device."))
    assert not verdict.other_bus_may_help


@pytest.mark.parametrize("hopeless", [True, False])
def test_a_guest_that_stops_is_lost_at_once(hopeless: bool) -> None:
    verdict, at_s = lost(lambda at: Seen(at, trouble="stopped" if at >= 4 else None, hopeless=hopeless, agent=at >= 4))
    assert (verdict.trouble, at_s, verdict.other_bus_may_help) == ("stopped", 4, not hopeless)


@given(
    st.lists(
        st.builds(
            dict,
            agent=st.booleans(),
            console=st.sampled_from(["", PROMPT, PANIC, "text"]),
            screen=st.sampled_from(["", "0x7B", "(initramfs)"]),
            resets=st.integers(0, 3),
            writes=st.integers(0, 5),
        ),
        max_size=60,
    ),
    st.sampled_from(["any", "agent", "running"]),
)
def test_every_watch_ends_and_never_before_a_sign_or_a_trouble(moments: list[dict[str, object]], check: Check) -> None:
    watch, resets, writes = Watch(check, TIMEOUT_S, ACTIVITY_S), 0, 0
    for number, moment in enumerate(moments):
        resets += int(str(moment["resets"]))
        writes += int(str(moment["writes"]))
        facts = moment | {"resets": resets, "writes": writes, "requests": writes}
        verdict = watch.judge(Seen(number * 10.0, **facts))  # type: ignore[arg-type]
        if verdict is not None:
            assert isinstance(verdict, Lost) or verdict in ("agent", "console", "activity", "running")
            assert verdict != "agent" or moment["agent"]
            return
    assert isinstance(watch.judge(Seen(TIMEOUT_S + len(moments) * 10, resets=resets)), Lost | str)
