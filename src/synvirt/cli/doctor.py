"""synvirt doctor: every requirement of this host, found or missing, what it is for and how to get it."""

import typer

from synvirt.cli.options import Options, with_options
from synvirt.cli.program import FAILED, shown

app = typer.Typer(
    invoke_without_command=True,
    help="Say what this host has, what it lacks, and how to get it. No service is needed.\n\nExample: synvirt doctor --json",
)


@app.callback()
@with_options
def doctor(options: Options) -> None:
    """Exit 0: the service can do its work here; 1: something that it needs is missing."""
    import json
    from dataclasses import asdict

    from synvirt.doctor import examine, needs_met

    findings = examine(options.settings)
    healthy = needs_met(findings)
    if options.json:
        print(json.dumps({"ok": healthy, "checks": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            verdict = "found" if finding.found else "MISSING" if finding.needed else "missing"
            print(shown(f"{verdict:8} {finding.name:19} {finding.detail}"))
            if not finding.found:
                print(shown(f"{'':8} {'':19} for {finding.what_for}; to get it: {finding.how_to_get}"))
        print("\nAll that is needed is here." if healthy else "\nWhat is MISSING is needed: the service cannot do its work.")
    if not healthy:
        raise typer.Exit(FAILED)
