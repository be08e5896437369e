"""synvirt receipt get|verify|key. `verify` itself reads files: it needs no service, and trusts none."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synvirt.cli.listing import full_id
from synvirt.cli.options import Options, with_options
from synvirt.cli.program import FAILED, shown
from synvirt.errors import BadRequest, Conflict, DiskWriteFailed, MalformedArchive, NotFound, text_of
from synvirt.nearest import did_you_mean_file

if TYPE_CHECKING:
    from synvirt.proof.signing import PublicKey

app = typer.Typer(no_args_is_help=True, help="Signed receipts of what was moved.")

# The most differing blocks of a volume that are listed.
NAMED_MOST = 10
_SIGNER_UNKNOWN = ", which is stored beside the receipt: compare it with the key that the host shows, or give --key"
_AUTHORITY_UNKNOWN = ", by an authority that is not checked: give --tsa-roots"


@app.command()
@with_options
def get(
    options: Options,
    job: Annotated[str, typer.Argument(help="The job's name, its id, or the id's beginning")],
    to: Annotated[Path, typer.Option(help="The folder that the receipt's folder is put into")] = Path(),
) -> None:
    """Fetch the receipt of a job that completed, as a folder receipt-JOB.

    Example: synvirt receipt get 1f3a --to receipts
    """
    import json
    import tempfile

    from synvirt.proof.unpacking import unpack

    with options.connect() as client, tempfile.TemporaryFile() as tar:
        job_id = full_id(client, "migration", job)
        client.save(f"/migrations/{job_id}/receipt", tar)
        tar.seek(0)
        try:
            folder = unpack(tar, to, f"receipt-{job_id}")
        except FileExistsError as error:
            raise Conflict(f"{to}/receipt-{job_id} already exists", hint="remove it, or name another folder") from error
        except OSError as error:
            raise DiskWriteFailed(f"{to} cannot be written: {error.strerror}") from error
    print(json.dumps({"path": str(folder)}) if options.json else shown(str(folder)))


@app.command()
@with_options
def key(options: Options) -> None:
    """Print the key that the service signs its receipts with, as `ssh-keygen -Y verify -f` wants it in a file.

    Example: synvirt receipt key > allowed_signers
    """
    import json

    with options.connect() as client:
        answer = client.ask("GET", "/receipts/key")
    print(answer if options.json else json.loads(answer)["allowed_signers"], end="\n" if options.json else "")


@app.command()
@with_options
def verify(  # noqa: PLR0917 - the framework passes them by name
    options: Options,
    folder: Annotated[Path, typer.Argument(help="A receipt's folder", metavar="FOLDER")],
    volume: Annotated[
        list[str] | None, typer.Option(help="A disk's volume to read: DISK=PATH, a raw file or a device", metavar="DISK=PATH")
    ] = None,
    chain: Annotated[Path | None, typer.Option(help="The folder with this and all other receipts of its host")] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key", help="The host's key, as `synvirt receipt key` printed it", metavar="FILE")
    ] = None,
    tsa_roots: Annotated[
        Path | None,
        typer.Option(
            help="Certificates (PEM) of authorities, one of which must have issued the receipt's time stamp", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Check a receipt: its files, its signatures, a volume against it, and that none is missing before it. Exits 1 where
    something is wrong.

    Example: synvirt receipt verify receipt-1f3a --volume scsi0:0=/dev/zvol/tank/synvirt/web --key allowed_signers
    """
    import json

    from synvirt.proof.signing import PublicKey

    options.work_here("a receipt is read here")
    _check_there(folder, hint="`synvirt receipt get` fetches a receipt")
    for named in (chain, key_file, tsa_roots, *(Path(each.partition("=")[2]) for each in volume or ())):
        if named is not None:
            _check_there(named)
    trusted = None if key_file is None else PublicKey.from_signers(text_of(key_file, what="key file "), key_file.name)
    verdict = _verdict(folder, trusted, volume or [], chain, tsa_roots)
    if options.json:
        print(json.dumps(verdict.as_json()))
    else:
        verdict.say()
    if verdict.problems:
        raise typer.Exit(FAILED)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What was found of a receipt. `signer_trusted`, `stamp_trusted`: whether a key, and roots, were given to check by."""

    statement: dict[str, Any] | None
    problems: tuple[str, ...]
    signer: "PublicKey | None"
    signer_trusted: bool
    stamped_at: str | None
    stamp_trusted: bool

    def as_json(self) -> dict[str, Any]:
        """The result for --json."""
        return {
            "good": not self.problems,
            "problems": self.problems,
            "key": None if self.signer is None else self.signer.fingerprint,
            "key_trusted": self.signer_trusted,
            "stamped_at": self.stamped_at,
            "stamp_trusted": self.stamped_at is not None and self.stamp_trusted,
        }

    def say(self) -> None:
        """Prints the result for people."""
        for problem in self.problems:
            print(f"WRONG  {shown(problem)}")
        if self.problems:
            return
        predicate = {} if self.statement is None else self.statement["predicate"]
        job = predicate.get("job") if isinstance(predicate.get("job"), dict) else {}
        name, host = shown(str((job or {}).get("name"))), shown(str(predicate.get("host")))
        print(f"The receipt of {name} by host {host} is as it was signed")
        if self.signer is not None:
            print(f"Signed with {self.signer.fingerprint}{'' if self.signer_trusted else _SIGNER_UNKNOWN}")
        if self.stamped_at is not None:
            print(f"It existed on {shown(self.stamped_at)}{'' if self.stamp_trusted else _AUTHORITY_UNKNOWN}")


def _verdict(
    folder: Path, trusted: "PublicKey | None", wanted: list[str], chain: Path | None, tsa_roots: Path | None
) -> _Verdict:
    """`wanted`: the volumes to compare, each as DISK=PATH."""
    from synvirt.proof.verifying import chained, checked, stamped

    found = checked(folder, trusted)
    problems = list(found.problems)
    for one in wanted:
        problems += _differing(folder, found.statement, one)
    if chain is not None:
        try:
            problems += chained(chain, trusted or found.key, None if found.statement is None else folder)
        except OSError as error:
            raise NotFound(f"{chain} cannot be read: {error.strerror}") from error
    stamped_at = None
    try:
        stamped_at = stamped(folder, tsa_roots)
    except MalformedArchive as error:
        problems.append(error.detail)
    if tsa_roots is not None and stamped_at is None and not problems:
        problems.append("the receipt has no time stamp")
    return _Verdict(found.statement, tuple(problems), found.key, trusted is not None, stamped_at, tsa_roots is not None)


def _check_there(path: Path, *, hint: str | None = None) -> None:
    if not path.exists():
        raise NotFound(f"there is no {path}", hint=did_you_mean_file(path) or hint)


def _differing(folder: Path, statement: dict[str, Any] | None, wanted: str) -> list[str]:
    from synvirt.disks.checking.ledger import BLOCK_BYTES
    from synvirt.disks.checking.repairing import refuse_written
    from synvirt.disks.raw.files import RawReader
    from synvirt.proof.verifying import differing, volumes

    name, _, path = wanted.partition("=")
    disks = {str(disk.get("key")): disk for disk in volumes(statement)} if statement is not None else {}
    if not path or name not in disks:
        raise BadRequest(f"--volume {wanted}: must be DISK=PATH", hint=f"its disks are {', '.join(disks) or 'none'}")
    blocks: list[int] = []
    try:
        with closing(RawReader(str(Path(path).absolute()))) as reader:
            refuse_written(reader.descriptor, Path(path).name)
            blocks = list(differing(folder, disks[name], reader))
    except MalformedArchive as error:
        return [f"disk {name}: {error.detail}"]
    named = [f"disk {name}: block {block} (at {block * BLOCK_BYTES}) is not what was copied" for block in blocks[:NAMED_MOST]]
    more = len(blocks) - NAMED_MOST
    return named + ([f"disk {name}: {more} more blocks are not what was copied"] if more > 0 else [])
