# ruff: noqa: E501 - the lines are those of the documents
"""The documents that are made from the code: `python -m tests.documents` writes them, test_user_documents.py checks that they are up to date."""

import json
import tempfile
from pathlib import Path
from typing import Any

from synvirt.errors import BY_CODE, SynvirtError, Unauthorized
from tests.fakes.service import Service

DOCS = Path(__file__).parents[2] / "docs"
MADE = "Made by `python -m tests.documents` from `{source}`: change it there."

# Where to look first, by code. Each job's own `hint` is more exact.
FIRST: dict[str, str] = {
    "E_MIG_BAD_REQUEST": "The detail names the field or the option. `/openapi.json` and [settings.md](settings.md) say what each takes.",
    "E_MIG_INVALID_PLAN": "`synvirt inspect` shows the VM's concerns. A Critical one is fixed at the source, or waived by its id: "
    "[importing-files.md](importing-files.md).",
    "E_MIG_UNSUPPORTED_FORMAT": "`synvirt inspect PATH` says what the file is. [importing-files.md](importing-files.md) lists what can be imported.",
    "E_MIG_MALFORMED_ARCHIVE": "Compare its checksum with the original's: most such files were cut off in transfer. Else export it again.",
    "E_MIG_HOST_PATH_REJECTED": "Put the file into the import root, `{data_dir}/imports`, or send it: `synvirt import FILE --upload`.",
    "E_MIG_AUTH_FAILED": "The source refuses the user or password that is stored for it; your own are right: `synvirt sources test NAME`, then `synvirt sources change NAME`.",
    "E_MIG_UNAUTHENTICATED": "Your own user, password or token for the service. `--user` and SYNVIRT_PASSWORD; on the service's own host its socket "
    "needs neither. `synvirt accounts list` and `synvirt tokens list` list who has access.",
    "E_BAK_UNAUTHENTICATED": "As E_MIG_UNAUTHENTICATED, for a path under /backup.",
    "E_BAK_FORBIDDEN": "As E_MIG_FORBIDDEN, for a path under /backup.",
    "E_MIG_NOT_FOUND": "`synvirt migrations list`, `synvirt sources list` and the others show what there is.",
    "E_MIG_FORBIDDEN": "The detail names the role that is needed. `synvirt accounts add NAME --role ROLE`; with PAM, the group of the setting. "
    "Or the page of another site sent the request.",
    "E_MIG_VM_NOT_FOUND": "`synvirt sources vms NAME` lists what the source shows to our user: a missing privilege hides VMs.",
    "E_MIG_UPLOAD_NOT_FOUND": "It expired (`upload_expires_days`), or was removed: send it again.",
    "E_MIG_CONFLICT": "Another job has the name, UUID or MAC address; or the job has ended; or another service has the data folder; or, with status 412, it was changed since the `ETag` that the request names. The detail says which.",
    "E_MIG_UPLOAD_REJECTED": "Too large: `upload_cap_bytes`, or put the file into the import root. Wrong SHA-256: it was changed on its way.",
    "E_MIG_SOURCE_UNREACHABLE": "`synvirt sources test NAME` shows which step fails: name, port, certificate, log-in. A job waits: half an "
    "hour for a source that is away when the job's turn comes, or while the guest is off; a day while it copies and the guest runs on (warm). It says so by a `last_error` that is not fatal and goes away by itself. "
    "So it waits, too, for another tool's backup of the VM to end, and for a changed password (`synvirt sources change NAME`).",
    "E_MIG_CBT_UNSUPPORTED": "Nothing is wrong: the job runs cold, and the guest is off while it is copied. `cbt_reason` of the manifest has the reason.",
    "E_MIG_CBT_RESET": "The whole disk is compared once, by itself. If it happens repeatedly, something else takes snapshots of the VM.",
    "E_MIG_SNAPSHOT_FAILED": "Another tool may be backing up the VM: a warm job waits for that, and says so. Or the source's datastore has no room, or the VM has too many snapshots. `synvirt sources test NAME --deep` tries one.",
    "E_MIG_DISK_READ_FAILED": "A damaged image, or a parent of it that is missing: `synvirt disk info IMAGE`.",
    "E_MIG_DISK_WRITE_FAILED": (
        "Usually there is no room: `synvirt destinations`. Then `synvirt migrations retry ID`. Where a zfs pool is not imported or suspended, or a "
        "`mount_point` not mounted, a job that goes on waits: half an hour while its guest is off, else a day. "
        "A restore to a new domain waits for a day."
    ),
    "E_MIG_V2V_FAILED": "[windows.md](windows.md) has the causes; `synvirt migrations retry ID` goes on with the copy.",
    "E_MIG_DOMAIN_DEFINE_FAILED": "libvirt's message is in the detail: a network or a machine type that this host lacks. `synvirt doctor`. "
    "While this host's libvirtd is away, for example as an update restarts it, jobs, backups, restores and rehearsals wait, and say so by an error that is "
    "not fatal: half an hour where the guest is off and for a rehearsal, else a day. `systemctl status libvirtd`.",
    "E_MIG_GUEST_BOOT_FAILED": "[guests.md](guests.md): what its screen showed, and other buses: `synvirt migrations retry ID --disk-bus sata`.",
    "E_MIG_OUTAGE_TOO_LONG": "The job holds, copies what changes, and cuts over once it fits. Raise `outage_budget_s`, wait for a "
    "quiet hour, or shorten the part that it names. A job that failed with it was rolled back by its plan's `on_overrun`: its guest "
    "runs at its source again.",
    "E_MIG_DELTA_TOO_LARGE": "Cut over at a quiet hour (`--cutover manual`), allow a larger last delta, or move it cold: "
    "[moving-from-vsphere.md](moving-from-vsphere.md).",
    "E_MIG_CANCELLED": "An operator asked for it. What the job had made is gone, and the source is as it was.",
    "E_MIG_PERSIST_FAILED": "Check the free space in {data_dir}, or the PostgreSQL server. Running jobs wait until it is back.",
    "E_MIG_SERVICE_UNREACHABLE": "An error of the command line, never of a job: no service listens there, or its certificate is not trusted. "
    "`synvirt serve`, or `systemctl status synvirt`; `--data-dir` and `--server` say which service is meant.",
    "E_MIG_INTERNAL": "Where the hint says so, this host or the service lacks processes, open files or memory: raise its unit's "
    "`TasksMax`, `LimitNOFILE` or `MemoryMax`. Else it is a bug of ours: send a `synvirt support-bundle` with the incident's number.",
    "E_BAK_BAD_REQUEST": "The detail names the field or the option. [backup.md](backup.md) says what a job, a repository and a restore take.",
    "E_BAK_NOT_FOUND": "`synvirt backup repositories`, `synvirt backup jobs`, `synvirt backup points` and `synvirt backup runs` show what there is. "
    "A point may have been removed by retention.",
    "E_BAK_CONFLICT": "The detail says what is in the way: a run of the same job or repository (`synvirt backup runs`), a name that is taken, or a "
    "guest that runs or has snapshots. Ask again when that is over.",
    "E_BAK_BUSY": "Wait a moment and ask again; a run does so by itself.",
    "E_BAK_CANCELLED": "An operator asked for it. No restore point was made, and what a restore had made is gone; what is stored already is used by the next run.",
    "E_BAK_INTERNAL": "Where the hint says so, this host or the service lacks processes, open files or memory: raise its unit's "
    "`TasksMax`, `LimitNOFILE` or `MemoryMax`. Else it is a bug of ours: send a `synvirt support-bundle` with the incident's number.",
    "E_BAK_INTERRUPTED": "The service ended too often during the run, or in the middle of what cannot be continued. Find out why it ended "
    "(`journalctl -u synvirt`), then start the run again: what is stored is not stored twice.",
    "E_BAK_SOURCE_RUNNING": "The guest was started meanwhile, or has saved memory. Start the run again; saved memory goes when the guest is started, or by "
    "`virsh managedsave-remove GUEST`. A restore in place needs a guest that is shut off.",
    "E_BAK_SOURCE_UNSUPPORTED": "The detail names the disk. Raw and qcow2 files, zfs volumes and block devices are backed up: [backup.md](backup.md).",
    "E_BAK_QUIESCE_FAILED": "Install qemu-guest-agent in the guest and see that it runs; or set the job's quiesce to `try`, which takes a point like one after a power cut.",
    "E_BAK_GUEST_STILL_FROZEN": "Look at this guest at once: it cannot write. `virsh domfsthaw GUEST`; if its agent does not answer, `virsh reset GUEST`.",
    "E_BAK_SNAPSHOT_FAILED": "The pool or the scratch folder has no room, or another backup of the guest is under way (`virsh domjobinfo GUEST`).",
    "E_BAK_SOURCE_READ_FAILED": "The guest was shut down in the middle, or its disk cannot be read: look at the host's disk (`dmesg`), then start the run again.",
    "E_BAK_DELTA_FALLBACK": "Nothing is wrong with the backup: the whole disk was read instead. If it happens at each run, something else removes the marks: "
    "checkpoints of the guest, or bookmarks of its volumes.",
    "E_BAK_REPOSITORY_UNREACHABLE": "A folder: is it there, and its NFS export mounted? A peer: does it run, does a firewall let this host through, was its certificate renewed?",
    "E_BAK_REPOSITORY_FULL": "Let retention remove points (`synvirt backup retention JOB`), then `synvirt backup collect REPOSITORY`: room comes back a day "
    "later. Or make the disk, or the quota of the peer's offer, larger.",
    "E_BAK_KEY_WRONG": "A recovery key has 55 letters and digits in groups of four. If another host changed the key, forget the repository here, and add it again with the new one. "
    "If this host has lost its key file, put it back from a copy of {data_dir}/keyring.",
    "E_BAK_DAMAGED": "`synvirt backup verify-repository REPOSITORY` names the damaged points. Do not restore those; check the disk that the repository lies on. "
    "The next run stores again what is missing, if the guest still has it.",
    "E_BAK_IMMUTABLE": "The peer keeps it for `keep_days`, or it is protected there. Wait, or ask its operator: `synvirt backup release-point OFFER POINT` there.",
    "E_BAK_STORE_WRITE_FAILED": "Check the health of the repository's disk, and who owns its folder: the service's user must be able to write there.",
    "E_BAK_DISK_WRITE_FAILED": "Usually the destination has no room: `synvirt destinations`. Then start the restore again.",
    "E_BAK_HOST_LACKS": "The detail names it: a machine type, a firmware (`apt-get install ovmf`). Or restore with `--target export`, and define the guest by hand.",
    "E_BAK_BOOT_TEST_FAILED": "`synvirt backup screenshot POINT FILE.png` saves the guest's screen; `synvirt backup verify POINT` says whether the bytes are right.",
    "E_BAK_AUTHOR_UNKNOWN": "Compare the key's fingerprint with what the other host's `synvirt receipt key` prints; if it is right, put that line into the file of the "
    "setting `backup_signers`. Else do not restore it.",
    "E_BAK_DOMAIN_DIFFERS": "The guest lacks a device that this host does not have: the warning names it. `virsh edit GUEST` gives it one of this host's.",
    "E_BAK_NO_WAY_BACK": "If the run is under way, nothing failed: if it is cancelled or fails, the device's content is lost, so let it end. If it has "
    "ended and names a snapshot, that has what the volume held: shut the guest off, and restore again; or `zfs rollback -r SNAPSHOT`, which destroys "
    "newer snapshots and what was written since. Then `zfs destroy SNAPSHOT`.",
    "E_BAK_SNAPSHOTS_LEFT_OUT": "Nothing is wrong with the backup: a restore gives the guest as it was at the run, without its snapshots. To keep the state "
    "of one, revert to it and start the job, or restore it from where it is. `virsh snapshot-delete GUEST NAME` ends the warning.",
    "E_BAK_START_FAILED": "The disks are restored, or are being copied. The detail has libvirt's message: `synvirt doctor`, then `virsh start GUEST`.",
}

# Codes that only a run of the backups warns with: no error has them. Their titles.
WARNINGS: dict[str, str] = {
    "E_BAK_AUTHOR_UNKNOWN": "The restore point is not signed, or signed by a key that this host does not know.",
    "E_BAK_DOMAIN_DIFFERS": "The restored guest differs from what it was.",
    "E_BAK_NO_WAY_BACK": "A disk is overwritten directly, and a restore that fails cannot undo that; or it has failed, and a zfs volume was not "
    "rolled back.",
    "E_BAK_SNAPSHOTS_LEFT_OUT": "The guest has snapshots, and they are not backed up.",
    "E_BAK_START_FAILED": "The restored guest did not start.",
}


def troubleshooting() -> str:
    lines = [
        "# Troubleshooting",
        "",
        MADE.format(source="src/synvirt/errors.py"),
        "",
        "Every error has a code, what happened (with names and numbers) and mostly a hint. A job's is its `last_error`: `synvirt migrations",
        "show ID`. Where the hint does not help, look here; then `synvirt doctor`; then `synvirt support-bundle` packs what we need to help you.",
        "",
        "A `last_error` that is not fatal (a `note` in `synvirt migrations show`) says how a job went. A `Completed` job keeps what says why",
        "its guest was down for longer than planned (`E_MIG_CBT_UNSUPPORTED`, `E_MIG_CBT_RESET`); what says that it waits, or that a pass over whole",
        "disks became necessary, goes when the wait is over, or when the pass ends while the guest runs.",
        "",
        "HTTP: the status where the API answers with it. Jobs that run have most of these in `last_error`, whatever the number says.",
        "",
    ]
    for code in sorted({*BY_CODE, *WARNINGS}, key=lambda code: (not code.startswith("E_MIG_"), code)):
        lines += [f"## {code}", "", *_meaning(code), "", FIRST[code], ""]
    return "\n".join(lines).rstrip() + "\n"


def _meaning(code: str) -> list[str]:
    if code in WARNINGS:
        return ["A warning of a run", f"- {WARNINGS[code]}"]
    kinds = [kind for kind in _kinds(SynvirtError) if kind.code == code and _is_the_services(kind)]
    statuses = sorted({kind.status for kind in kinds})
    # The root has the code of Internal, and its title.
    titles = dict.fromkeys(kind.title() for kind in kinds)
    return [f"HTTP {', '.join(map(str, statuses))}", *(f"- {title}" for title in titles)]


def _kinds(root: type[SynvirtError]) -> list[type[SynvirtError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _kinds(child))]


def _is_the_services(kind: type[SynvirtError]) -> bool:
    """Those of errors.py: what a module makes of them for itself has their codes."""
    return kind.__module__ == Unauthorized.__module__


def api(document: dict[str, Any]) -> str:
    lines = [
        "# API reference",
        "",
        MADE.format(source="/openapi.json"),
        "",
        "HTTP Basic or a token (`Authorization: Bearer …`) over HTTPS, or the Unix socket `{data_dir}/synvirt.sock` without a password. `/openapi.json` has every field; lists answer",
        '`{"items": [], "next_cursor": null}` and take `limit` and `cursor`; errors are RFC 9457 problems with an E_ code',
        "([troubleshooting.md](troubleshooting.md)). `/api/v1/waves`, `tokens` and `audit` are served under `/api/v1/migrator`, too.",
        "",
        "So that nobody undoes another's change: send the `ETag` of the GET as `If-Match` with the PUT or PATCH. If it was changed since, by a",
        "person or by the service (a run of a backup job, the test of a source), the answer is 412 and nothing is changed. Without `If-Match`",
        "the last one to write wins.",
        "",
    ]
    for path, operations in document["paths"].items():
        lines += [f"## `{path}`", ""]
        for method, operation in operations.items():
            if method not in ("get", "post", "put", "patch", "delete"):
                continue
            lines.append(f"**{method.upper()}** {_first(operation)}")
            lines.append("")
            if "x-required-role" in operation:
                lines += [f"- role {operation['x-required-role']}"]
            rows = [_parameter(one) for one in operation.get("parameters", []) if one["in"] != "path"]
            rows += [f"- body: {_body(operation['requestBody'])}"] if "requestBody" in operation else []
            rows.append(
                "- answers "
                + ", ".join(_answer(status, response) for status, response in sorted(operation["responses"].items()))
            )
            lines += [*rows, ""]
    return "\n".join(lines).rstrip() + "\n"


def _first(operation: dict[str, Any]) -> str:
    return " ".join((operation.get("description") or operation.get("summary") or "").split("\n\n")[0].split())


def _parameter(one: dict[str, Any]) -> str:
    description = " ".join(one.get("description", "").split())
    return f"- `{one['name']}` ({one['in']}{', required' if one.get('required') else ''}){': ' + description if description else ''}"


def _body(body: dict[str, Any]) -> str:
    return "; ".join(f"`{media}` {_named(content.get('schema', {}))}".strip() for media, content in body["content"].items())


def _answer(status: str, response: dict[str, Any]) -> str:
    names = [_named(one.get("schema", {})) for one in response.get("content", {}).values()]
    named = ", ".join(dict.fromkeys(name for name in names if name and name != "ProblemDetails"))
    return f"{status} {named}".strip()


def _named(schema: dict[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def openapi() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder))
        document: dict[str, Any] = json.loads(json.dumps(service.app.openapi()))
        service.close()
    return document
