"""The words for backups on pages."""

from pydantic import BaseModel

from synvirt.backups.model import BackupRun, PointFate, Status

_RUNS = {
    "backup": "Backup",
    "restore": "Restore",
    "verify": "Verification",
    "boot_test": "Boot test",
    "collect": "Collection of what nothing needs",
}
_TONES = {Status.COMPLETED: "good", Status.FAILED: "bad", Status.CANCELLED: "quiet", Status.QUEUED: "quiet"}
_CONSISTENCY = {
    "application": "applications frozen",
    "filesystem": "file systems frozen",
    "crash": "as after a power cut",
    "offline": "shut off",
}
_QUIESCE = {
    "off": "as they are, as after a power cut",
    "try": "file systems frozen if the guest's agent can",
    "require": "file systems frozen, or no backup",
}
_KEPT = {
    "keep_last": "newest",
    "keep_hourly": "hours",
    "keep_daily": "days",
    "keep_weekly": "weeks",
    "keep_monthly": "months",
    "keep_yearly": "years",
}
_KEPT_BY = {
    "all": "everything is kept",
    "newest": "the last one left",
    "keep_last": "one of the newest",
    "keep_hourly": "the hour's last",
    "keep_daily": "the day's last",
    "keep_weekly": "the week's last",
    "keep_monthly": "the month's last",
    "keep_yearly": "the year's last",
}
_WAYS = {
    "zfs": "by a snapshot of zfs",
    "bitmap": "what has changed since the last one",
    "scan": "all of it, while it ran",
    "offline": "shut off",
}
_TRIGGERS = {"asked": "somebody", "schedule": "its schedule", "again": "its schedule, as the run before was cut off"}


def run_words(run: BackupRun) -> str:
    return _RUNS.get(run.kind, run.kind)


def run_tone(status: Status) -> str:
    return _TONES.get(status, "busy")


def consistency_words(consistency: str) -> str:
    return _CONSISTENCY.get(consistency, consistency)


def quiesce_words(quiesce: str) -> str:
    return _QUIESCE.get(quiesce, quiesce)


def retention_words(retention: BaseModel) -> str:
    """A retention in words."""
    rules = [f"{count} {_KEPT.get(name, name)}" for name, count in retention.model_dump().items() if count is not None]
    return ", ".join(rules) or "everything"


def kept_words(fate: PointFate) -> str:
    """Without its protection, which is shown for every point."""
    return ", ".join(_KEPT_BY.get(line, line) for line in fate.kept_by if line != "protected")


def way_words(way: str) -> str:
    return _WAYS.get(way, way)


def trigger_words(trigger: str) -> str:
    return _TRIGGERS.get(trigger, trigger)


WORDS = (
    run_words,
    run_tone,
    consistency_words,
    quiesce_words,
    retention_words,
    kept_words,
    way_words,
    trigger_words,
)
