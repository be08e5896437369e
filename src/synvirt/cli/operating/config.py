"""synvirt config: the service's settings, and the origin of each value."""

from typing import Any

import typer

from synvirt.cli.options import Options, with_options
from synvirt.cli.program import shown, value_text

app = typer.Typer(help="The settings, and where each value came from. No service is needed.")

_OF_HERE = "these are the settings of this host"


@app.command()
@with_options
def show(options: Options) -> None:
    """Every setting, its value, and the file, variable or option that it came from. Passwords are not shown. Exit 2: a
    setting is wrong, or data_dir can be no folder.

    Example: synvirt config show --config /etc/synvirt/synvirt.toml
    """
    import json

    from synvirt.settings import origins
    from synvirt.settings.data_dir import check_data_dir

    options.work_here(_OF_HERE, about_service=True)
    settings = options.settings
    check_data_dir(settings)
    came_from = origins(config=options.settings_file, flags={"data_dir": options.data_dir})
    values = _without_secrets(settings)
    if options.json:
        print(
            json.dumps(
                {
                    "file": str(options.settings_file) if options.settings_file else None,
                    "settings": {
                        name: {"value": value, "origin": came_from.get(name, "default")} for name, value in values.items()
                    },
                }
            )
        )
        return
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:{width}} {shown(value_text(value)):34} {came_from.get(name, 'default')}".rstrip())


@app.command()
@with_options
def check(options: Options) -> None:
    """Say whether a service would start with these settings. Exit 2: it would not, and why.

    Example: synvirt config check --config /etc/synvirt/synvirt.toml
    """
    import json

    from synvirt.destinations import chosen
    from synvirt.settings import starting

    options.work_here(_OF_HERE, about_service=True)
    settings = options.settings
    starting.check(settings)
    destinations = chosen.destinations(settings)
    if options.json:
        print(json.dumps({"ok": True, "destinations": list(destinations)}))
    else:
        where = options.settings_file or "the defaults, and the environment's variables"
        print(shown(f"The settings are right ({where}). Volumes go to {next(iter(destinations))} where a plan does not say."))


def _without_secrets(settings: Any) -> dict[str, Any]:
    from urllib.parse import urlsplit

    from synvirt.redacting import redacted

    password = urlsplit(settings.database_url).password
    found: dict[str, Any] = redacted(settings.model_dump(mode="json"), known=(password,) if password else ())
    return found
