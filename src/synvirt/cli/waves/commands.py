"""synvirt waves: many VMs in their order, within their windows."""

import typer

from synvirt.cli.waves.acting import approve, cancel, deliver_again, go, hold, remove, retry, roll_back, skip
from synvirt.cli.waves.documents import export, import_, replace, select
from synvirt.cli.waves.showing import deliveries, list_waves, member, members, report, show, simulate, watch

app = typer.Typer(
    help="Waves: many VMs, in their order and within their windows.\n\nExample: synvirt waves list", no_args_is_help=True
)

# In the order of `synvirt waves --help`.
for _name, _command in {
    "import": import_,
    "select": select,
    "replace": replace,
    "list": list_waves,
    "show": show,
    "members": members,
    "member": member,
    "watch": watch,
    "simulate": simulate,
    "go": go,
    "hold": hold,
    "cancel": cancel,
    "roll-back": roll_back,
    "approve": approve,
    "skip": skip,
    "retry": retry,
    "deliveries": deliveries,
    "deliver-again": deliver_again,
    "remove": remove,
    "export": export,
    "report": report,
}.items():
    app.command(_name)(_command)
