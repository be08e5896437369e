"""Settings: one TOML file; SYNVIRT_* variables override it, flags override those. The defaults work with nothing set.

A key of the file's table [zfs] is `zfs_…` here and SYNVIRT_ZFS_… in the environment, so that each setting has one name.
"""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import quote, urlsplit

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from synvirt.errors import BadRequest, text_of
from synvirt.mistakes import worded, written
from synvirt.model.plan import DestinationName
from synvirt.model.values import Received
from synvirt.nearest import did_you_mean
from synvirt.settings.forms import BasePath, DatabaseUrl, Hosts, Listen, Networks, Place, ToolArguments, Words, pairs, paths
from synvirt.sizes import GIB

ENV_PREFIX = "SYNVIRT_"
# Where the package and the sample unit keep the service's settings.
SERVICE_CONFIGS = (Path("/etc/synvirt/synvirt.toml"), Path("/etc/synvirt.toml"))
# Variables of that prefix that are not settings: the specification's own (part 1), this file's path, the command line's.
ENV_NOT_SETTINGS = frozenset(
    {
        "SYNVIRT_MIGRATOR_SKIP_GO_SHIM",
        "SYNVIRT_CONFIG",
        "SYNVIRT_LAB",  # where `make lab` keeps its guest
        "SYNVIRT_PASSPHRASE",
        "SYNVIRT_PASSWORD",
        "SYNVIRT_PEER_PASSWORD",
        "SYNVIRT_RECOVERY_KEY",
        "SYNVIRT_REMOTE_DOMAIN",
        "SYNVIRT_REMOTE_PASSWORD",
        "SYNVIRT_REMOTE_TOKEN",
        "SYNVIRT_SERVER",
        "SYNVIRT_USER",
    }
)

# Where an OpenID provider sends a browser back to, under {base_url}.
OIDC_CALLBACK = "/login/oidc/callback"
# In the import root, and shown by the uploads' own list instead of the folder's.
UPLOADS_FOLDER = ".uploads"


def default_data_dir() -> Path:
    """BadRequest, where the user has no home."""
    if os.geteuid() == 0:
        return Path("/var/lib/synvirt")
    try:
        return Path.home() / ".local/share/synvirt"
    except RuntimeError as error:  # HOME is not set, and no file names this user: a container's
        raise BadRequest("this user has no home", hint="--data-dir or SYNVIRT_DATA_DIR names the service's folder") from error


class DirectorySetting(Received):
    """Sparse files in a folder, which is made where it is missing. `mount_point`: where its file system is mounted, the folder
    itself or one above it. While nothing is mounted there, nothing is made, and no volume counts as gone."""

    kind: Literal["directory"]
    path: Place
    mount_point: Place | None = None

    @model_validator(mode="after")
    def _is_beneath(self) -> Self:
        if self.mount_point is not None and not self.path.is_relative_to(self.mount_point):
            raise ValueError(f"path {self.path} does not lie beneath mount_point {self.mount_point}")
        return self


class ZfsSetting(Received):
    """A destination on zfs: volumes are made under `pool`/`namespace`."""

    kind: Literal["zfs"]
    pool: str
    namespace: str = "synvirt"


class RbdSetting(Received):
    """Images in a Ceph pool. docs/ceph.md says where the client's key has to be."""

    kind: Literal["rbd"]
    pool: str
    client: str = "admin"
    conf: Place = Path("/etc/ceph/ceph.conf")


class BackupOfferSetting(Received):
    """A folder for another SynVirt to keep its backups in. `user`: an account of this service, which may do nothing else."""

    path: Place
    user: Annotated[str, Field(min_length=1)]
    keep_days: Annotated[float, Field(ge=0, le=36500)] = 30
    # The most bytes in it; None: as much as there is space for.
    quota_bytes: Annotated[int, Field(gt=0)] | None = None


class WaveCommandSetting(Received):
    """A program that webhooks of waves may name. `user`: whose rights it has, where the service runs as root."""

    argv: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, max_length=64)]
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30
    user: Annotated[str, Field(min_length=1)] = "nobody"


_DESTINATIONS = (DirectorySetting, ZfsSetting, RbdSetting)
DestinationSetting = Annotated[DirectorySetting | ZfsSetting | RbdSetting, Field(discriminator="kind")]
# Two weeks. The kernel waits for 24 days at most, and not for ever.
WAIT_S_MAX = 14 * 86400


class Settings(Received):
    """All settings, with their defaults: docs/settings.md."""

    data_dir: Place = Field(default_factory=default_data_dir)
    listen: Listen = "127.0.0.1:8441"
    base_url: BasePath = ""
    auth: Literal["file", "pam"] = "file"
    pam_service: str = "login"
    # With auth = "pam": the host's groups whose members may call, by role; at least one has to be set.
    pam_admin_group: str = ""
    pam_operator_group: str = ""
    pam_viewer_group: str = ""
    # The socket of root's helper (systemd: synvirt-helper.socket). None: the service itself, as root, does what needs root.
    helper_socket: Place | None = None
    # OpenID Connect: people log in on the page by another service's accounts. Empty: off. docs/operating.md
    oidc_issuer: Annotated[str, Field(pattern=r"^(https://[^\s?#@]+)?$")] = ""
    oidc_client_id: str = ""
    # A file, so that the settings hold no secret; None: a public client, protected only by PKCE.
    oidc_client_secret_file: Place | None = None
    # As registered with the provider: https://THIS-SERVICE{base_url}/login/oidc/callback
    oidc_redirect_uri: Annotated[str, Field(pattern=r"^(https?://[^\s?#@]+)?$")] = ""
    oidc_scopes: Words = ("openid", "profile", "email")
    # The claim with a person's groups. The file's table [oidc.roles] gives a role for each group.
    oidc_roles_claim: Annotated[str, Field(min_length=1)] = "groups"
    oidc_roles: Annotated[dict[str, Literal["viewer", "operator", "admin"]], BeforeValidator(pairs)] = Field(
        default_factory=dict
    )
    # The claim with a person's name here, for example in the audit trail.
    oidc_name_claim: Annotated[str, Field(min_length=1)] = "preferred_username"
    # The provider's name on the page; empty: its host.
    oidc_label: Annotated[str, Field(max_length=60)] = ""
    # Of the provider's certificate; empty: this host's certificate authorities decide.
    oidc_fingerprint_sha256: Annotated[str, Field(pattern=r"^(([0-9A-Fa-f]{2}:?){31}[0-9A-Fa-f]{2})?$")] = ""
    # Proxies (addresses, networks) whose X-Forwarded-For is trusted, separated by commas: failed log-ins are counted by it.
    trusted_proxies: Networks = ()
    # Off only on a loopback address, behind an operator's proxy.
    tls: bool = True
    # None: a certificate made on first start, in {data_dir}/keyring.
    tls_certificate: Place | None = None
    tls_key: Place | None = None
    # Empty: SQLite in data_dir. A PostgreSQL URL serves a fleet: postgresql://user@host/database
    database_url: DatabaseUrl = ""
    # This host's name in the store, the same after each restart. With a database_url it must be set, different for each host.
    host_id: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[\w.-]+$")] = "local"
    # The destination of a plan that names none; auto: zfs if a pool is set, else directory.
    destination: DestinationName = "auto"
    zfs_pool: str = ""
    zfs_namespace: str = "synvirt"
    # More destinations, by name: tables [destinations.NAME] of the file.
    destinations: dict[DestinationName, DestinationSetting] = Field(default_factory=dict)
    # Empty: the embedded driver, qemu:///embed?root={data_dir}/libvirt. The appliance sets qemu:///system
    libvirt_uri: str = ""
    # The user of the embedded driver's guests, if the service is root: auto: a user of the host without other rights
    # (libvirt-qemu, qemu), if one exists and can open what guests need; root: like the service; or a user's name.
    qemu_user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]*$")] = "auto"
    jobs_at_once: Annotated[int, Field(ge=1, le=256)] = 4
    # How much of this host's memory and processors waves may promise to guests: memory once, as a guest that lacks it fails;
    # each processor to this many virtual ones.
    memory_overcommit: Annotated[float, Field(ge=0.1, le=16)] = 1.0
    cpu_overcommit: Annotated[float, Field(ge=0.1, le=64)] = 8.0
    # On each host of a source: every job reads disks that the host's own guests need too.
    jobs_per_source: Annotated[int, Field(ge=1, le=256)] = 4
    # On all hosts of a source together: a vCenter answers for each, and what is read through it passes it.
    jobs_per_source_in_all: Annotated[int, Field(ge=1, le=1024)] = 16
    # On each destination. For a shared one it counts over all hosts of the fleet, which should all have the same value.
    jobs_per_destination: Annotated[int, Field(ge=1, le=1024)] = 16
    # Backups and verifications, and as many restores and boot tests in addition. Each reads with one thread for each core.
    backups_at_once: Annotated[int, Field(ge=1, le=64)] = 2
    # Over all hosts of a fleet, which should all have the same value.
    runs_per_repository: Annotated[int, Field(ge=1, le=256)] = 8
    # For jobs on disks of a lost host, if their plan does not say. Jobs on a shared destination go on elsewhere.
    on_host_lost: Literal["wait", "restart_elsewhere"] = "wait"
    # None: what `make bench` found best for this many cores.
    copy_threads: Annotated[int, Field(ge=1, le=64)] | None = None
    # A migration, backup, restore, verification or collection that reads no byte for this long fails. It is long, because a
    # compressed disk that is resumed is read from its beginning.
    copy_stalled_s: Annotated[float, Field(gt=0, le=WAIT_S_MAX)] = 7200
    boot_timeout_s: Annotated[float, Field(gt=0, le=WAIT_S_MAX)] = 600
    boot_check: Literal["any", "agent", "running"] = "any"
    # A guest without agent and console has booted if it has written to its disks again and again for this long.
    boot_activity_s: Annotated[float, Field(ge=5, le=3600)] = 60
    upload_cap_bytes: Annotated[int, Field(gt=0)] = 20 * GIB
    # An upload that no job reads is removed after this long.
    upload_expires_days: Annotated[float, Field(gt=0, le=3650)] = 7
    # Ended migrations and backup runs are removed after this many days, except failed migrations that kept their volumes, and
    # the last run of each backup job. 0: never.
    keep_ended_days: Annotated[float, Field(ge=0, le=36500)] = 0
    # Entries of the audit trail are removed after this many days. 0: never.
    audit_keep_days: Annotated[float, Field(ge=0, le=36500)] = 730
    # Hosts from which VMs may be read by URL: names (nas.example, *.example), addresses, networks (10.0.0.0/8), separated by
    # commas. Empty: all but this host itself, link-local addresses and cloud metadata.
    remote_allowed_hosts: Hosts = ()
    # Hosts that sources and backup peers may have, as above. Empty: all but link-local addresses and cloud metadata.
    source_allowed_hosts: Hosts = ()
    # Certificate authorities (PEM) that are trusted besides the host's own when VMs are read by https.
    remote_ca_file: Place | None = None
    virtio_win_iso: Place = Path("/usr/share/virtio-win/virtio-win.iso")
    # The folder of rhsrvany.exe: virt-v2v puts it into a Windows guest to install the agent at the first start.
    virt_tools_dir: Place = Path("/usr/share/virt-tools")
    # How Hyper-V exports are imported: by an outside tool, by our own readers, or by the tool where it has the driver.
    vmcx_way: Literal["auto", "tool", "own"] = "auto"
    vmcx_tool: str = "virt-v2v"
    vmcx_tool_driver: str = "hyperv"
    vmcx_tool_arguments: ToolArguments = "-i {driver} {source} -o local -os {folder} -of raw"
    vmcx_tool_timeout_s: Annotated[float, Field(gt=0, le=WAIT_S_MAX)] = 86400
    # Files and folders that the confined tool may read besides the export and installed packages. Separated by commas.
    vmcx_tool_reads: Annotated[tuple[Place, ...], BeforeValidator(paths)] = ()
    # Folders that other SynVirts may keep their backups in, by name: tables [backup_offers.NAME] of the file.
    backup_offers: dict[DestinationName, BackupOfferSetting] = Field(default_factory=dict)
    # Folders that restore points may be exported to, besides {data_dir}/exports, separated by commas.
    backup_export_roots: Annotated[tuple[Place, ...], BeforeValidator(paths)] = ()
    # Programs that webhooks of waves may name: tables [wave_commands.NAME] of the file.
    wave_commands: dict[DestinationName, WaveCommandSetting] = Field(default_factory=dict)
    # A signed receipt of each job that completes, with the SHA-256 of every 4 MiB of its volumes.
    receipts: bool = True
    # The authority that time-stamps receipts (RFC 3161), and the trusted root certificates (PEM) for its stamps.
    receipt_tsa: Annotated[str, Field(pattern=r"^(https?://[^\s@]+)?$")] = ""
    receipt_tsa_roots: Place = Path("/etc/ssl/certs/ca-certificates.crt")
    # Keys of other hosts whose restore points are trusted: lines of `synvirt receipt key`, one for each host.
    backup_signers: Place | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def imports_dir(self) -> Path:
        return self.data_dir / "imports"

    @property
    def uploads_dir(self) -> Path:
        return self.imports_dir / UPLOADS_FOLDER

    @property
    def keyring_dir(self) -> Path:
        return self.data_dir / "keyring"

    @property
    def receipts_dir(self) -> Path:
        return self.data_dir / "receipts"

    @property
    def volumes_dir(self) -> Path:
        return self.data_dir / "volumes"

    @property
    def destinations_by_name(self) -> "dict[str, DestinationSetting]":
        """All destinations that plans may name, the default first. BadRequest, if the default is not among them."""
        found: dict[str, DestinationSetting] = {"directory": DirectorySetting(kind="directory", path=self.volumes_dir)}
        if self.zfs_pool:
            found["zfs"] = ZfsSetting(kind="zfs", pool=self.zfs_pool, namespace=self.zfs_namespace)
        found |= self.destinations
        default = ("zfs" if self.zfs_pool else "directory") if self.destination == "auto" else self.destination
        if default not in found:
            hint = "set zfs_pool" if default == "zfs" else f"there are {', '.join(found)}"
            raise BadRequest(f"setting destination: there is no destination {default}", hint=hint)
        return {default: found[default], **found}

    @property
    def socket_path(self) -> Path:
        return self.data_dir / "synvirt.sock"

    @property
    def store_url(self) -> str:
        # A question mark would begin its parameters, and what looks like an escape would be one.
        return self.database_url or f"sqlite:///{quote(str(self.data_dir / 'migrator.db'))}"

    def check_host_id(self) -> None:
        """BadRequest, if hosts may share the store and this one has no name of its own."""
        if self.database_url.startswith("postgres") and "host_id" not in self.model_fields_set:
            raise BadRequest(
                "setting host_id: is required with a PostgreSQL database_url, since hosts are distinguished by it",
                hint='name each host, host_id = "kvm1" say; the jobs of earlier versions are those of host_id = "local"',
            )

    def check_oidc(self) -> None:
        """BadRequest, if an OpenID provider is set, but a setting that log-ins need is missing."""
        if not self.oidc_issuer:
            return
        base = self.base_url.strip("/")
        path = f"{'/' if base else ''}{base}{OIDC_CALLBACK}"
        where = f"https://THIS-SERVICE{path}, as it is registered there"
        needed = (
            ("oidc_client_id", self.oidc_client_id, "the name that this service is registered by at the provider"),
            ("oidc_roles", self.oidc_roles, 'a table [oidc.roles], a line a group: "virt-admins" = "admin"'),
            ("oidc_redirect_uri", self.oidc_redirect_uri, where),
        )
        for name, value, hint in needed:
            if not value:
                raise BadRequest(f"setting {name}: is required with an oidc_issuer", hint=hint)
        if urlsplit(self.oidc_redirect_uri).path != path:
            raise BadRequest(f"setting oidc_redirect_uri: its path has to be {path}", hint=where)
        if "openid" not in self.oidc_scopes:
            raise BadRequest("setting oidc_scopes: openid has to be among them")

    @property
    def hypervisor_uri(self) -> str:
        return self.libvirt_uri or f"qemu:///embed?root={quote(str(self.data_dir / 'libvirt'))}"


def load(
    *, config: Path | None = None, environ: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Settings:
    """Flags over environment over file over defaults. BadRequest names the wrong setting and its origin."""
    layers = list(_layers(config, os.environ if environ is None else environ, flags or {}))
    values = {name: value for layer in layers for name, (value, _) in layer.items()}
    try:
        # Frozen strictness is for callers' JSON; the environment has only strings, so this mode is lax about types.
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "_".join(str(part) for part in written(first["loc"]))
        origin = _origins(layers).get(str(first["loc"][0]), "")
        stands = f" ({origin})" if origin else ""
        near = did_you_mean(str(first["loc"][-1]), _known_at(first["loc"])) if first["type"] == "extra_forbidden" else None
        hint = near or "docs/settings.md lists every setting"
        raise BadRequest(f"setting {where}{stands}: {worded(first)}", hint=hint) from None


def _known_at(loc: tuple[str | int, ...]) -> Iterable[str]:
    """The names that a setting could have had there: in the file itself, or in one of its tables (`[destinations.NAME]`)."""
    table, *within = loc
    if not within:
        return Settings.model_fields
    if table == "destinations":
        return next(one for one in _DESTINATIONS if within[1] in get_args(one.model_fields["kind"].annotation)).model_fields
    return (BackupOfferSetting if table == "backup_offers" else WaveCommandSetting).model_fields


def origins(
    *, config: Path | None = None, environ: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Where each setting that is not at its default came from: `FILE`, `environment SYNVIRT_…`, `--option`. Errors as in
    `load`."""
    return _origins(list(_layers(config, os.environ if environ is None else environ, flags or {})))


def service_config(environ: Mapping[str, str] | None = None) -> Path | None:
    """The settings file of a command that names no file and no folder: SYNVIRT_CONFIG, else that of this host's service."""
    environ = os.environ if environ is None else environ
    if (named := _named_file(environ)) is not None or "SYNVIRT_DATA_DIR" in environ:
        return named
    return next((path for path in SERVICE_CONFIGS if os.access(path, os.R_OK)), None)


def _named_file(environ: Mapping[str, str]) -> Path | None:
    """The file that SYNVIRT_CONFIG names; empty, it counts as unset."""
    named = environ.get("SYNVIRT_CONFIG")
    return Path(named) if named else None


# A setting's value, and where it came from.
_Layer = dict[str, tuple[Any, str]]


def _layers(config: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Iterator[_Layer]:
    """The layers of settings; later ones override earlier ones."""
    chosen = config or _named_file(environ)
    if chosen is not None:
        yield {name: (value, str(chosen)) for name, value in _flat(_read_toml(chosen)).items()}
    yield {
        variable.removeprefix(ENV_PREFIX).lower(): (value, f"environment {variable}")
        for variable, value in environ.items()
        if variable.startswith(ENV_PREFIX) and variable not in ENV_NOT_SETTINGS
    }
    yield {name: (value, f"--{name.replace('_', '-')}") for name, value in flags.items() if value is not None}


def _origins(layers: list[_Layer]) -> dict[str, str]:
    return {name: origin for layer in layers for name, (_, origin) in layer.items()}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text_of(path, what="settings file "))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadRequest(f"settings file {path}: {error}") from error


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and key not in ("destinations", "backup_offers", "wave_commands", "oidc_roles"):
            flat.update({f"{key}_{inner}": item for inner, item in value.items()})
        else:
            flat[key] = value
    return flat
