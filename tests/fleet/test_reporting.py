"""The report of a wave: what it counts, and that names of strangers stay text in each of its forms."""

import csv
import io
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID
from xml.etree import ElementTree as ET

from synvirt.fleet.model import Member, MemberState, Wave, WaveForecast, WaveState
from synvirt.fleet.reporting import COLUMNS, WaveReport, as_csv, as_html, report_of
from tests.fleet.made import member

AT = datetime(2026, 11, 28, 22, tzinfo=UTC)


def moved(name: str, **fields: Any) -> Member:
    return Member(**(member(name).model_dump() | {"state": MemberState.HEALTHY} | fields))


def wave(**fields: Any) -> Wave:
    return Wave(**({"id": UUID(int=1), "name": "november", "state": WaveState.COMPLETED, "created_at": AT} | fields))


def test_it_counts_outages_causes_and_how_late_it_was() -> None:
    forecast = WaveForecast(
        starts_at=AT, ends_p50=AT + timedelta(hours=4), ends_p95=AT + timedelta(hours=6), bottleneck="esx1", made_at=AT
    )
    members = [
        moved("a", outage_s=60, outage_budget_s=90, planned_at=AT, cut_over_at=AT + timedelta(minutes=10)),
        moved("b", outage_s=120, outage_budget_s=90),
        moved("c", outage_s=600, planned_at=AT, cut_over_at=AT - timedelta(minutes=4)),
        moved("d", state=MemberState.FAILED, cause="its disk is full"),
        moved("e", state=MemberState.FAILED, cause="its disk is full"),
        moved("f", state=MemberState.SKIPPED, cause="It was skipped."),
    ]
    report = report_of(wave(forecast=forecast, finished_at=AT + timedelta(hours=5)), members)
    assert report.late_s == 3600
    assert report.counts == {MemberState.HEALTHY: 3, MemberState.FAILED: 2, MemberState.SKIPPED: 1}
    assert list(report.causes.items()) == [("its disk is full", 2), ("It was skipped.", 1)]
    assert report.outages is not None
    assert report.outages.model_dump() == {"members": 3, "median_s": 120, "longest_s": 600, "over_budget": 1}
    assert report.forecast_error is not None
    assert report.forecast_error.model_dump() == {"members": 2, "median_s": 420, "p95_s": 600}
    assert WaveReport.model_validate_json(report.model_dump_json()) == report
    lines = list(csv.DictReader(io.StringIO(as_csv(report))))
    assert tuple(lines[0]) == COLUMNS
    assert [(one["id"], one["outage_s"], one["cause"]) for one in lines][2:4] == [
        ("c", "600.0", ""),
        ("d", "", "its disk is full"),
    ]
    shown = "".join(
        ET.fromstring(as_html(report).removeprefix("<!doctype html>").replace('<meta charset="utf-8">', "")).itertext()
    )
    assert "1 of 3 over their budget" in shown
    assert "1 h later" in shown
    assert "half of 2 within 7 min of it, 95 % within 10 min" in shown


def test_a_wave_that_has_not_begun_has_a_report_too() -> None:
    report = report_of(wave(state=WaveState.DRAFT), [])
    assert (report.late_s, report.outages, report.forecast_error, report.counts, report.causes) == (None, None, None, {}, {})
    assert as_csv(report) == ",".join(COLUMNS) + "\r\n"
    assert "Draft" not in as_html(report)
    assert "draft" in as_html(report)


def test_names_of_others_are_text() -> None:
    bad = "<script>alert('&')</script>"
    report = report_of(wave(name=bad, reason=bad), [moved("a", vm=f"=cmd {bad}", cause=f"{bad}\x1b")])
    page = as_html(report)
    assert "<script" not in page
    assert "\x1b" not in page
    assert next(csv.DictReader(io.StringIO(as_csv(report))))["vm"].startswith("'=cmd")
