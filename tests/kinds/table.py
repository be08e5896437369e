"""The kinds of job of the product, and the ways that each of them goes."""

from tests.kinds import instant_restores, rehearsals, repairs, restores, runs
from tests.kinds.laws import Kind
from tests.kinds.migrations import ByTool, OnZfs, Retry, RetryLive, Scenario, instant, live, offline, slowly
from tests.kinds.running import ByBitmap
from tests.kinds.waves import Led, LedAgain

_WARM, _COLD = Scenario(live("Warm"), live=True), Scenario(live("Cold"), live=True)
_LIES, _FORGETS = Scenario(live("Warm"), live=True, lies=True), Scenario(live("Warm"), live=True, forgets=True)
_NO_BOOT = Scenario(live("Warm"), fail="boot", live=True)

KINDS: tuple[Kind, ...] = (
    Kind("migration", "offline, by processes", Scenario(offline, processes=True), parts=3, surely=15, threads=True),
    # A copy of its place would have what its threads go on to write.
    Kind("migration", "offline, in pieces", Scenario(slowly), cancels=False, surely=12),
    Kind("migration", "offline, Windows", Scenario(offline, family="windows"), surely=15, copied=True),
    Kind("migration", "offline, no boot", Scenario(offline, fail="boot"), ends="Failed", cancels=False, surely=15, copied=True),
    Kind("migration", "warm", _WARM, parts=3, surely=25, cancelled_at=14, meanwhile=_WARM.guest_lives_on, copied=True),
    Kind("migration", "cold", _COLD, parts=2, surely=20, meanwhile=_COLD.guest_lives_on, copied=True),
    Kind(
        "migration",
        "warm, a source that lies",
        _LIES,
        parts=3,
        taken=(0,),
        cancels=False,
        surely=25,
        meanwhile=_LIES.guest_lives_on,
        copied=True,
    ),
    Kind(
        "migration",
        "warm, a source that forgets",
        _FORGETS,
        parts=3,
        taken=(1,),
        cancels=False,
        surely=25,
        meanwhile=_FORGETS.guest_lives_on,
        copied=True,
    ),
    Kind("migration", "warm, no boot", _NO_BOOT, ends="Failed", parts=3, taken=(2,), cancels=False, surely=25, copied=True),
    Kind("migration", "offline, the ladder", Scenario(offline, boots_from=("sata",)), surely=20, copied=True),
    Kind(
        "migration", "offline, no rung", Scenario(offline, boots_from=()), ends="Failed", cancels=False, surely=20, copied=True
    ),
    Kind("migration", "instant", Scenario(instant), parts=3, surely=25, cancelled_at=18, copied=True),
    Kind(
        "migration",
        "instant, no boot",
        Scenario(instant, fail="boot"),
        ends="Failed",
        parts=3,
        taken=(1,),
        cancels=False,
        surely=25,
        copied=True,
    ),
    Kind("migration", "offline, to zfs", OnZfs, parts=2, surely=12),
    Kind("migration", "passthrough", ByTool, parts=2, surely=20, copied=True),
    Kind("migration", "retry", Retry, once=True, copied=True),
    Kind(
        "migration",
        "retry, warm",
        RetryLive,
        once=True,
        parts=3,
        taken=(0,),
        surely=25,
        meanwhile=_WARM.guest_lives_on,
        copied=True,
    ),
    Kind("migration", "repair", repairs.from_files, once=True, surely=12, copied=True),
    Kind("migration", "repair, of a VM", repairs.from_vm, once=True, parts=2, taken=(0,), surely=12, copied=True),
    Kind("backup", "offline", runs.Backup, late=6, copied=True),
    Kind("backup", "of a guest that runs", ByBitmap, real=True, late=16),
    Kind("restore", "export", runs.Export, once=True, cancelled_at=5),
    Kind("restore", "new_domain", restores.NewDomain, real=True, cancelled_at=8),
    Kind(
        "restore",
        "new_domain, instant",
        instant_restores.AtOnce,
        parts=2,
        surely=15,
        meanwhile=instant_restores.lives_on,
        copied=True,
    ),
    Kind("restore", "in_place", restores.InPlace, surely=15, real=True, late=20, cancelled_at=8),
    Kind("boot_test", "a boot sector", restores.BootTest, real=True, late=6),
    Kind("verify", "a point", runs.OfPoint, once=True, surely=9, cancelled_at=6),
    Kind("verify", "a repository", runs.OfRepository, once=True, surely=9),
    Kind("collect", "garbage", runs.Collection, once=True, surely=12, late=20),
    # Its job syncs on meanwhile, and commits what it does.
    Kind("rehearsal", "as it is", rehearsals.never, parts=2, cancels=False, surely=10, copied=True),
    Kind("rehearsal", "converted", rehearsals.always, parts=2, surely=10, late=60, copied=True),
    Kind("rehearsal", "on overlays", rehearsals.on_overlays, parts=3, surely=10, late=60, copied=True),
    Kind("wave", "its leader", Led, parts=2, surely=12, cancelled_at=8, copied=True),
    # A kill while it is given back is the line above.
    Kind("wave", "a member again", LedAgain, once=True, parts=2, taken=(0,), surely=8, copied=True),
)
