"""synvirt doctor: every requirement of a host, found or missing, with its purpose and how to get it."""

import json
from typing import Any

import typer

from synvirt.cli.options import Options, with_options
from synvirt.cli.program import FAILED, shown

app = typer.Typer(
    invoke_without_command=True,
    help=(
        "Say what this host has, what it lacks, and how to get it. No service is needed; with --server: what the service there "
        "found on its own host.\n\nExample: synvirt doctor --json"
    ),
)


@app.callback()
@with_options
def doctor(options: Options) -> None:
    """Exit 0: the service can do its work there; 1: something that it needs is missing."""
    found = _here(options) if options.address is None else _there(options)
    if options.json:
        print(json.dumps(found))
    else:
        for check in found["checks"]:
            verdict = "found" if check["found"] else "MISSING" if check["needed"] else "missing"
            print(shown(f"{verdict:8} {check['name']:19} {check['detail']}"))
            if not check["found"]:
                print(shown(f"{'':8} {'':19} what for: {check['what_for']}; to get it: {check['how_to_get']}"))
        healthy = "All that is needed is there." if options.address else "All that is needed is here."
        print(f"\n{healthy if found['ok'] else 'What is MISSING is needed: the service cannot do its work.'}")
    if not found["ok"]:
        raise typer.Exit(FAILED)


def _here(options: Options) -> dict[str, Any]:
    from dataclasses import asdict

    from synvirt.doctor import examine, needs_met

    findings = examine(options.settings)
    return {"ok": needs_met(findings), "checks": [asdict(finding) for finding in findings]}


def _there(options: Options) -> dict[str, Any]:
    """ServiceUnreachable, if the service has not looked yet."""
    from synvirt.errors import ServiceUnreachable

    with options.connect() as client:
        found: dict[str, Any] | None = json.loads(client.health()).get("detail")
    if found is None:
        raise ServiceUnreachable(
            f"the service at {options.address} shows no checks of its host",
            hint="it makes them as it starts: ask again in a minute; and it shows them to callers with an account alone",
        )
    return found
