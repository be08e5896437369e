"""The pages' labels for the fields of a plan: the service's own words are the API's, and people read a form's labels."""

import re
from collections.abc import Iterator, Mapping

from synvirt.web.plans import FIELDS

# By the form's names.
LABELS: dict[str, str] = {
    "name": "Name",
    "cpu_count": "Processors",
    "memory": "Memory",
    "disk_bus": "Disk bus",
    "destination": "Storage",
    "identity": "UUID and MAC addresses",
    "conversion": "Drivers put into it",
    "bandwidth": "The most to read in a second",
    "mode": "How it moves",
    "cutover": "When it cuts over",
    "window": "Only in the window",
    "verify": "What is compared",
    "delta_threshold": "Small enough",
    "max_passes": "Passes",
    "interval": "Seconds between two passes",
    "sync_rule": "Rule of the schedule",
    "sync_start": "First time of the schedule",
    "sync_zone": "Time zone of the schedule",
    "sync_every": "Seconds between two syncs",
    "start_at": "When it begins",
    "shutdown": "How it is shut down",
    "shutdown_timeout": "Seconds to shut down in",
    "outage_budget": "Seconds off at most",
    "on_overrun": "If it takes longer",
    "instant": "Start at once",
    "disk": "Disks to copy",
    "waive": "Concerns",
}
# Fields of a plan without a text in the form.
_OTHERS: Mapping[str, str] = {
    "target.network_map": "Network",
    "target.start": "Start it here in the end",
    "target": "The machine here",
    "skip_disks": LABELS["disk"],
    "waive_concerns": LABELS["waive"],
    "source_ref.source_id": "The source",
    "source_ref.vm_id": "The machine",
    "source_ref": "The machine",
    "warm.schedule": "Schedule",
    "on_host_lost": "If this host is lost",
}
_SENTENCES: Mapping[str, str] = {
    "set target.identity to new": "choose new ones at «UUID and MAC addresses»",
    "target.identity is new": "new ones are chosen at «UUID and MAC addresses»",
    "set target.start to false": "leave «Start it here in the end» out",
    "target.start false": "«Start it here in the end» left out",
    "name the concern's id in waive_concerns": "confirm it at «Concerns»",
    "set conversion to never": "choose Never at «Drivers put into it»",
    "skip_disks names it": "it is left out at «Disks to copy»",
    "skip_disks leaves it out": "it is left out at «Disks to copy»",
}


def _paths() -> dict[str, str]:
    return {".".join(path): LABELS[name] for name, path in FIELDS.items()} | dict(_OTHERS)


def _replaced() -> Iterator[tuple[re.Pattern[str], str]]:
    """A field of one plain word, like `name`, may be any word of a sentence: it is a field only alone or after `plan.`."""
    for sentence, words in _SENTENCES.items():
        yield re.compile(rf"\b{re.escape(sentence)}\b"), words
    for path, label in sorted(_paths().items(), key=lambda one: -len(one[0])):
        is_plain = re.fullmatch("[a-z]+", path) is not None
        yield re.compile(rf"^{re.escape(path)}(\[\d+\](\.\w+)?)?$"), label
        before = r"\bplan\." if is_plain else r"\b(?:plan\.)?"
        yield re.compile(rf"{before}{re.escape(path)}\b(\[\d+\](\.\w+)?)?"), f"«{label}»"


_REPLACED = tuple(_replaced())


def as_labels(text: str) -> str:
    """Replaces the API's words for a plan's fields by the form's labels."""
    for found, words in _REPLACED:
        text = found.sub(words, text)
    return text
