"""The picture of a forecast: valid XML whatever the names, and of a size that does not grow with the fleet."""

from datetime import UTC, datetime
from xml.etree import ElementTree as ET

from bench.service.fleet import NOW, fleet
from synvirt.fleet.gantt import ROWS_MAX, gantt
from synvirt.fleet.simulation.forecast import simulate
from synvirt.fleet.simulation.nouns import Load, MemberForecast, Simulation, Site
from synvirt.migrations.planning.openings import spans_of
from synvirt.sizes import GIB
from tests.fleet.made import member, wave

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [found.text or "" for found in ET.fromstring(picture).iter(f"{SVG}text")]


def test_few_members_have_a_row_each() -> None:
    made, loads = fleet(12, 3, 2)
    found = simulate(made, loads, Site(), NOW)
    picture = gantt(found, spans_of(made, NOW))
    shown = texts(picture)
    assert {f"vm-{n}" for n in range(12)} <= set(shown)
    assert any(text.startswith("p95 ") for text in shown)
    titles = [one.text or "" for one in ET.fromstring(picture).iter(f"{SVG}title")]
    assert any(title.startswith("open: w") for title in titles)


def test_a_fleet_has_a_row_a_host_and_a_bounded_size() -> None:
    made, loads = fleet(200, 90, 3)
    found = simulate(made, loads, Site(), NOW)
    picture = gantt(found, spans_of(made, NOW))
    shown = texts(picture)
    assert sum(" VMs" in text for text in shown) == ROWS_MAX
    assert any(text.startswith("31 more hosts") for text in shown)
    assert len(picture) < 600_000


def test_names_of_others_are_text() -> None:
    at = datetime(2026, 12, 1, tzinfo=UTC)
    bad = "<script>alert('&\"')</script>\x00\x1b"
    one = MemberForecast(id=bad, source_host=bad, destination=bad, begins_at=at, ready_at=at, planned_at=at, reason=bad)
    several = Simulation(forecast=None, members=(one,) * 70, unfinished=1, runs=0, ends=(), bottleneck_seconds={})
    for found in (several, several.model_copy(update={"members": (one,)})):
        picture = gantt(found, {}, title=bad)
        ET.fromstring(picture)
        assert "<script" not in picture
        assert "\x1b" not in picture


def test_a_wave_that_does_not_move_says_so() -> None:
    found = simulate(wave(), {}, Site(), NOW)
    assert texts(gantt(found)) == ["No member of this wave moves: see the reason of each."]
    one = simulate(wave(member("a")), {"a": Load(GIB, "h", "d")}, Site(), NOW)
    assert "a" in texts(gantt(one))
