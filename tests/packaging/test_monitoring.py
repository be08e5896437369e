"""The example board and the alert rules name what the service tells, and are what Grafana and Prometheus take."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from synvirt.api.backup_metrics import BackupMetrics
from synvirt.api.metrics import Metrics
from synvirt.jobs.board import Board
from synvirt.store import Store
from tests.fakes.backups import FakeGuests, backups_of
from tests.needs import need

FOLDER = Path(__file__).parents[2] / "docs/monitoring"
BOARD = json.loads((FOLDER / "board.json").read_text())
_NAME = re.compile(r"\b(?:synvirt|process)_[a-z_]+\b")


def _metrics(store: Store, folder: Path) -> Metrics:
    metrics = Metrics(store, Board(), host="local", jobs_at_once=4)
    BackupMetrics(backups_of(store, FakeGuests(folder / "guests"), folder), metrics.registry)
    return metrics


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every name of a series that /metrics can have."""
    folder = tmp_path_factory.mktemp("store")
    store = Store(f"sqlite:///{folder / 'store.db'}")
    metrics = _metrics(store, folder)
    names = set()
    for family in metrics.registry.collect():
        match family.type:
            case "counter":
                names |= {f"{family.name}_total"}
            case "histogram":
                names |= {f"{family.name}_{end}" for end in ("bucket", "count", "sum")}
            case _:
                names |= {family.name}
    store.close()
    return names


def expressions() -> list[str]:
    found: list[str] = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    return found + [variable["query"] for variable in BOARD["templating"]["list"]]


def test_the_board_names_what_is_reported(series: set[str]) -> None:
    named = {name for expression in expressions() for name in _NAME.findall(expression)}
    assert named - series == set()
    assert {name for name in series if name.startswith("synvirt_") and not name.endswith("_sum")} - named <= {
        "synvirt_downtime_seconds_count",
        "synvirt_outage_error_seconds_count",
        "synvirt_wave_forecast_error_seconds_count",
    }, "the board shows all that the service tells"


def test_the_board_is_whole() -> None:
    panels: list[dict[str, Any]] = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_the_rules_name_what_is_reported(series: set[str]) -> None:
    rules = (FOLDER / "alerts.yml").read_text()
    named = set(_NAME.findall(rules))
    assert named, "no rule names a metric"
    assert named <= series


def test_prometheus_takes_the_rules() -> None:
    tool = need("promtool", "prometheus")
    done = subprocess.run([tool, "check", "rules", FOLDER / "alerts.yml"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 rules found" in done.stdout


def test_prometheus_takes_the_boards_expressions(tmp_path: Path) -> None:
    """As rules, with the board's variables filled in: promtool parses each."""
    tool = need("promtool", "prometheus")
    queries = [expression.replace("$instance", ".*") for expression in expressions() if "(" in expression or "{" in expression]
    queries = [expression for expression in queries if not expression.startswith("label_values")]
    rules = [{"record": f"board:{number}", "expr": expression} for number, expression in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    done = subprocess.run([tool, "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_finds_nothing_to_repair_in_what_is_reported(tmp_path: Path) -> None:
    tool = need("promtool", "prometheus")
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    text, _ = _metrics(store, tmp_path).text("")
    store.close()
    done = subprocess.run([tool, "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()


def test_every_metric_is_described() -> None:
    page = (FOLDER.parent / "monitoring.md").read_text()
    described = set(re.findall(r"^\| `(synvirt_\w+)`", page, re.MULTILINE))
    named = {re.sub(r"_(bucket|count|sum)$", "", name) for expression in expressions() for name in _NAME.findall(expression)}
    assert {name for name in named if name.startswith("synvirt_")} == described
