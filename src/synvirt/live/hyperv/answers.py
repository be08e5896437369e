"""The form of each script's answer, checked once, when it has come. What is read of it later has the type that is written here.

The scripts are ours, and so are the fields; but a profile or a policy of the host may change what PowerShell makes of them, and
one who controls the host may send anything.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Annotated, Any, Final, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from synvirt.live.odd import OddAnswer, first_mistake

# CIM's uint64 counts bytes; what is more than a signed one is no size of ours.
Number = Annotated[int, Field(ge=-(1 << 31), lt=1 << 63)]
Maybe = Number | None


def _as_text(value: object) -> str:
    """PowerShell writes nothing, or a number, for some texts."""
    if value is None or isinstance(value, str | int | float):
        return "" if value is None else str(value)
    raise ValueError("it is no text")


Text = Annotated[str, BeforeValidator(_as_text)]
_OPEN: Final = ConfigDict(extra="allow")


@with_config(_OPEN)
class File(TypedDict):
    """A file of a disk; with `error` the rest of it is not known."""

    path: Text
    error: NotRequired[Text]
    format: NotRequired[Maybe]
    size: NotRequired[Maybe]
    file_size: NotRequired[Maybe]
    sector: NotRequired[Maybe]
    id: NotRequired[Text]


@with_config(_OPEN)
class Slot(TypedDict):
    """The place where a disk is attached."""

    bus: Number
    controller: Number
    location: Number


class Drive(Slot):
    """A disk of a VM, with its files from the newest on."""

    path: str | None
    physical: bool
    shared: bool
    chain: list[File]


@with_config(_OPEN)
class Vm(TypedDict):
    """A VM of `list`."""

    id: str
    name: Text
    state: Text
    cpus: Maybe
    memory: Maybe


@with_config(_OPEN)
class Vms(TypedDict):
    """`list`"""

    vms: list[Vm] | None


@with_config(_OPEN)
class Node(TypedDict):
    """A node of a cluster."""

    name: Text
    up: bool


@with_config(_OPEN)
class About(TypedDict):
    """`about`"""

    name: Text
    product: Text
    version: Text
    vm_versions: list[Text] | None
    domain: Text
    in_domain: bool
    user: Text
    nodes: list[Node] | None
    administrator: bool
    hyperv_administrator: bool


@with_config(_OPEN)
class Firmware(TypedDict):
    """The settings of a VM's firmware."""

    secure_boot: bool
    template: Text
    boot: list[Slot]


@with_config(_OPEN)
class Security(TypedDict):
    """The protection of a VM."""

    tpm: bool
    shielded: bool


@with_config(_OPEN)
class Card(TypedDict):
    """A network card."""

    id: Text
    mac: Text
    legacy: bool
    connected: bool
    switch: Text
    addresses: list[Text]
    vlan_mode: Maybe
    vlan: Maybe


@with_config(_OPEN)
class Service(TypedDict):
    """An integration service."""

    id: Text
    enabled: bool


@with_config(_OPEN)
class Checkpoint(TypedDict):
    """A checkpoint of an administrator's."""

    id: Text
    name: Text
    created: datetime


@with_config(_OPEN)
class Machine(TypedDict):
    """`inspect`"""

    id: str
    bios_guid: NotRequired[Text]
    bios_serial: NotRequired[Text]
    name: Text
    state: Number
    generation: Number
    version: Text
    checkpoint_type: Number
    replication: Number
    cpus: Number
    cpus_per_socket: Maybe
    memory: Number
    memory_dynamic: bool
    memory_least: Maybe
    memory_most: Maybe
    firmware: Firmware
    security: Security
    nics: list[Card]
    services: list[Service]
    checkpoints: list[Checkpoint]
    kvp: list[Text]
    dvds: list[Text] | None
    floppies: NotRequired[list[Text] | None]
    pci: NotRequired[Maybe]
    gpus: NotRequired[Maybe]
    fibre_channel: Maybe
    ports: list[str] | None
    drives: list[Drive]


@with_config(_OPEN)
class Recovery(TypedDict):
    """A recovery snapshot."""

    id: Text
    notes: Text
    drives: list[Drive]


@with_config(_OPEN)
class Point(TypedDict):
    """A reference point."""

    id: Text
    type: Maybe
    disks: list[Text] | None
    trackings: list[Text] | None


@with_config(_OPEN)
class State(TypedDict):
    """`state`"""

    state: Text
    status: Text
    version: Text
    changed: Text
    checkpoint_type: Number
    notes: str
    drives: list[Drive]
    snapshots: list[Recovery]
    points: list[Point]


@with_config(_OPEN)
class Changes(TypedDict):
    """`changes`"""

    processed: Maybe
    offsets: list[Maybe] | None
    lengths: list[Maybe] | None


@with_config(_OPEN)
class Job(TypedDict):
    """`job`"""

    state: Maybe
    percent: Maybe
    code: Maybe
    text: Text


@with_config(_OPEN)
class Export(TypedDict):
    """`export`"""

    job: Text


@with_config(_OPEN)
class Power(TypedDict):
    """`power`"""

    heard: bool


@with_config(_OPEN)
class Notes(TypedDict):
    """`notes`"""

    written: bool
    notes: Text


@with_config(_OPEN)
class Points(TypedDict):
    """`convert`"""

    points: list[Text] | None


_FORMS: Final[Mapping[str, Any]] = {
    "about": About,
    "list": Vms,
    "inspect": Machine,
    "state": State,
    "changes": Changes,
    "job": Job,
    "export": Export,
    "power": Power,
    "notes": Notes,
    "convert": Points,
}


@cache
def _form(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_FORMS.get(name, dict[str, Any]))


def checked(name: str, found: Any, where: str) -> Any:
    """The answer of that script, with numbers that came as texts as numbers. OddAnswer."""
    try:
        return _form(name).validate_python(found)
    except ValidationError as error:
        raise OddAnswer(where, f"{name}.ps1", f"what is not its form in {first_mistake(error)}") from error
