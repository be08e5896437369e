"""A wave of what was chosen on the page: ids, windows, what is wrong."""

import pytest

from synvirt.errors import BadRequest
from synvirt.fleet.member_ids import ids
from synvirt.fleet.waves import check
from synvirt.web.forms import Form
from synvirt.web.waves.new import wave_request
from tests.fleet.made import plan


def form(**fields: str) -> Form:
    return Form({"wave_name": ("night",)} | {name: (value,) for name, value in fields.items()})


def test_names_become_ids_each_once() -> None:
    assert ids(["web 1", "web/1", "web-1", "…", "x" * 200, "x" * 200]) == [
        "web-1",
        "web-1-2",
        "web-1-3",
        "vm",
        "x" * 58,
        "x" * 58 + "-2",
    ]


def test_what_was_filled_in_is_the_wave() -> None:
    plans = [plan("vm-1").model_copy(update={"name": "db 01"}), plan("vm-2").model_copy(update={"name": "web"})]
    made = wave_request(
        form(
            window_start="2030-11-28T22:00:00",
            window_end="2030-11-29T04:00:00",
            window_timezone="Europe/Berlin",
            window_rrule="FREQ=WEEKLY",
            wave_at_once="2",
            wave_budget="600",
        ),
        plans,
    )
    check(made)
    assert [(one.id, one.vm, one.plan.name, one.outage_budget_s) for one in made.members] == [
        ("db-01", "db 01", "db 01", 600),
        ("web", "web", "web", 600),
    ]
    assert (made.windows[0].timezone, made.windows[0].rrule, made.limits.per_source_host) == ("Europe/Berlin", "FREQ=WEEKLY", 2)
    assert wave_request(form(), plans).windows == ()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"wave_name": ""}, "the wave's name"),
        ({"window_end": "2030-11-29T04:00:00"}, "the window"),
        ({"window_start": "tomorrow", "window_end": "2030-11-29T04:00:00"}, "the window"),
        ({"wave_at_once": "many"}, "copies at once"),
        ({"wave_budget": "-1"}, "a member"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, str], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        wave_request(form(**fields), [plan("vm-1")])
    with pytest.raises(BadRequest, match="0 machines"):
        wave_request(form(), [])
