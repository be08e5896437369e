"""Common parts of the commands of `synvirt backup`: lists, requests, and runs that they start."""

from typing import Annotated, Any

import typer

from synvirt.cli.backup.runs import follow
from synvirt.cli.listing import Listed, id_of, print_one, print_page
from synvirt.cli.options import Options
from synvirt.cli.program import print_sheet, value_text

REPOSITORIES = Listed("repository", "/backup/repositories", "synvirt backup repositories", "name")
JOBS = Listed("backup job", "/backup/jobs", "synvirt backup jobs", "name")
RUNS = Listed("run", "/backup/runs", "synvirt backup runs")
POINTS = Listed("restore point", "/backup/restore-points", "synvirt backup points")

ShortId = "Its id, or the beginning of it"
Run = Annotated[str, typer.Argument(metavar="RUN", help=ShortId)]
Point = Annotated[str, typer.Argument(metavar="POINT", help=ShortId)]
Job = Annotated[str, typer.Argument(metavar="JOB", help="Its name or id")]
Repository = Annotated[str, typer.Argument(metavar="REPOSITORY", help="Its name or id")]


def list_things(
    options: Options, listed: Listed, table: Any, limit: int, cursor: str | None, *, only: dict[str, Any] | None = None
) -> None:
    """Prints a page of things as a table, or as JSON. `only`: the list's filters; those of `job_id` and `repository_id` may be
    names."""
    with options.connect() as client:
        asked = dict(only or {})
        for field, of in (("job_id", JOBS), ("repository_id", REPOSITORIES)):
            if asked.get(field) is not None:
                asked[field] = id_of(client, of, asked[field])
        answer = client.ask("GET", listed.path, params={"limit": limit, "cursor": cursor} | asked)
    things = listed.path.rpartition("/")[2].replace("-", " ")
    print_page(answer, none=f"There are no {things}", show=table, as_json=options.json)


def ask(options: Options, method: str, listed: Listed, one: str, rest: str = "", *, outcome: str, json: Any = None) -> None:
    """A request that is done when it is answered."""
    with options.connect() as client:
        id_ = id_of(client, listed, one)
        answer = client.ask(method, f"{listed.path}/{id_}{rest}", json=json)
    if not options.json:
        print(f"{listed.noun.capitalize()} {id_} {outcome}")
    elif answer:
        print(answer)


def start_run(options: Options, listed: Listed, one: str, rest: str, *, json: Any = None, params: Any = None) -> None:
    """A request that starts a run."""
    with options.connect() as client:
        path = f"{listed.path}/{id_of(client, listed, one)}/{rest}"
        follow(options, client, client.ask("POST", path, json=json, params=params))


def show_thing(options: Options, listed: Listed, one: str) -> None:
    """Prints one thing, field by field."""
    print_one(
        options,
        lambda client: f"{listed.path}/{id_of(client, listed, one)}",
        lambda found: print_sheet((name, value_text(value)) for name, value in found.items()),
    )
