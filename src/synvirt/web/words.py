"""Figures, times and states in words for people, in one place, so that all pages use the same words."""

import json
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime

from synvirt.model.kinds import LiveKind, OfflineKind, State
from synvirt.model.problems import Problem
from synvirt.model.rehearsal import RehearsalState
from synvirt.sizes import sized

STATES: dict[State, str] = {
    State.QUEUED: "Queued",
    State.COPYING_FULL: "Copying",
    State.DELTA_SYNCING: "Syncing changes",
    State.CUTTING_OVER: "Cutting over",
    State.V2V_PROCESSING: "Preparing guest",
    State.STARTING: "Starting",
    State.COMPLETED: "Completed",
    State.FAILED: "Failed",
    State.CANCELLED: "Cancelled",
}


KINDS: dict[LiveKind | OfflineKind, str] = {
    LiveKind.VIM_API: "VMware vSphere",
    LiveKind.WMI_API: "Hyper-V",
    LiveKind.PVE_API: "Proxmox VE",
    LiveKind.LIBVIRT_REMOTE: "libvirt / KVM",
    LiveKind.XEN_API: "XenServer / XCP-ng",
    LiveKind.PRISM_API: "Nutanix AHV",
    OfflineKind.OVA_ARCHIVE: "OVA archive",
    OfflineKind.OVF_FOLDER: "OVF folder",
    OfflineKind.VMX_FOLDER: "VMware folder",
    OfflineKind.VHDX: "VHDX disk",
    OfflineKind.QCOW2: "QCOW2 disk",
    OfflineKind.VMDK: "VMDK disk",
    OfflineKind.VMCX_EXPORT: "Hyper-V export",
    OfflineKind.VBOX_FOLDER: "VirtualBox machine",
    OfflineKind.XVA_ARCHIVE: "XVA archive",
}


def kind_words(kind: LiveKind | OfflineKind) -> str:
    return KINDS[kind]


# Letters and symbols that are drawn as nothing.
_BLANK = frozenset("\N{HANGUL FILLER}\N{HANGUL CHOSEONG FILLER}\N{HANGUL JUNGSEONG FILLER}\N{BRAILLE PATTERN BLANK}")
_BLANK |= {"\N{HALFWIDTH HANGUL FILLER}"}


def visible(name: str) -> str:
    """The name where any of it can be seen. Else words in its place: a link without a text cannot be followed."""
    seen = any(unicodedata.category(one)[0] not in "ZC" and one not in _BLANK for one in name)
    return name if seen else "(a name that cannot be seen)"


def state_words(state: State, starts: bool = True, repairs: bool = False) -> str:
    """`starts`: the guest will be started here; otherwise its domain is only defined. `repairs`: the job is a repair, which
    compares."""
    if repairs and state is State.COPYING_FULL:
        return "Comparing"
    return "Defining" if state is State.STARTING and not starts else STATES[state]


def tone(state: State) -> str:
    """The colour of a state: a class of the style sheet."""
    tones = {State.COMPLETED: "good", State.FAILED: "bad", State.CANCELLED: "quiet", State.QUEUED: "quiet"}
    return tones.get(state, "busy")


REHEARSAL_STATES: dict[RehearsalState, tuple[str, str]] = {
    RehearsalState.WAITING: ("Waiting for the end of a pass", "quiet"),
    RehearsalState.PREPARING: ("Preparing guest", "busy"),
    RehearsalState.BOOTING: ("Booting", "busy"),
    RehearsalState.CHECKING: ("Checking", "busy"),
    RehearsalState.SWEEPING: ("Removing what it made", "busy"),
    RehearsalState.PASSED: ("Passed", "good"),
    RehearsalState.FAILED: ("Failed", "bad"),
    RehearsalState.CANCELLED: ("Cancelled", "quiet"),
}


def rehearsal_words(state: RehearsalState) -> str:
    return REHEARSAL_STATES[state][0]


def rehearsal_tone(state: RehearsalState) -> str:
    return REHEARSAL_STATES[state][1]


def problem_tone(problem: Problem) -> str:
    """Three colours: errors that ended a job, requests of the operator, and problems with which the job goes on."""
    if not problem.fatal:
        return "note"
    return "quiet" if problem.code == "E_MIG_CANCELLED" else "bad"


def size(count: float | None) -> str:
    """A size in words; a dash, if it is not known."""
    return "–" if count is None else sized(count)


def rate(bps: float) -> str:
    return f"{size(bps)}/s"


def moment(at: datetime | None) -> str:
    """With the zone UTC, as the page does not know the reader's zone."""
    return "–" if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%H:%M:%S")


def as_json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)


# Pydantic's words are for programmers; its `ctx` has the figures.
MISTAKES = {
    "int_parsing": "is not a whole number",
    "float_parsing": "is not a number",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be {ge} or more",
    "less_than_equal": "must be {le} or less",
    "string_too_long": "is longer than {max_length} characters",
    "string_pattern_mismatch": "has a character that it cannot have",
    "datetime_parsing": "is not a date and a time",
    "datetime_from_date_parsing": "is not a date and a time",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
}
