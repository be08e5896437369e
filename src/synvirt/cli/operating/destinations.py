"""synvirt destinations: where volumes can go."""

import typer

from synvirt.cli.listing import print_table
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import shown
from synvirt.sizes import sized

app = typer.Typer(
    invoke_without_command=True,
    help="List where volumes can go. Choose with `synvirt import --destination NAME`.\n\nExample: synvirt destinations",
)


@app.callback()
@with_options
def destinations(options: Options) -> None:
    """The default is the first. The settings name them: docs/settings.md."""
    import json

    with options.connect() as client:
        answer = client.ask("GET", "/destinations")
    if options.json:
        print(answer)
        return
    rows = [
        (shown(one["name"]), one["kind"], "yes" if one["default"] else "", _free(one), shown(one["problem"] or ""))
        for one in json.loads(answer)["items"]
    ]
    print_table(("NAME", "KIND", "DEFAULT", "FREE", "PROBLEM"), rows)


def _free(one: dict[str, int | None]) -> str:
    return "" if one["free_bytes"] is None else sized(one["free_bytes"])
