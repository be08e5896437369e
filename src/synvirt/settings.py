"""Settings: one TOML file, SYNVIRT_* variables over it, flags over those; defaults that work with nothing set.

A key of the file's table [zfs] is `zfs_…` here and SYNVIRT_ZFS_… in the environment, so that each setting has one name.
"""

import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from synvirt.errors import BadRequest
from synvirt.mistakes import worded
from synvirt.model.plan import DestinationName
from synvirt.model.values import Received
from synvirt.nearest import did_you_mean, hint_for
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
    return Path("/var/lib/synvirt") if os.geteuid() == 0 else Path.home() / ".local/share/synvirt"


class DirectorySetting(Received):
    """Sparse files in a folder, which is made where it is missing."""

    kind: Literal["directory"]
    path: Path


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
    conf: Path = Path("/etc/ceph/ceph.conf")


class BackupOfferSetting(Received):
    """A folder for another SynVirt to keep its backups in. `user`: an account of this service, which may do nothing else."""

    path: Path
    user: Annotated[str, Field(min_length=1)]
    keep_days: Annotated[float, Field(ge=0, le=36500)] = 30
    # How much may lie there at most; None: as much as there is room for.
    quota_bytes: Annotated[int, Field(gt=0)] | None = None


class WaveCommandSetting(Received):
    """A program that webhooks of waves may name. `user`: whose rights it has, where the service runs as root."""

    argv: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, max_length=64)]
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30
    user: Annotated[str, Field(min_length=1)] = "nobody"


DestinationSetting = Annotated[DirectorySetting | ZfsSetting | RbdSetting, Field(discriminator="kind")]


def _words(value: Any) -> Any:
    """A list, or what the environment has for one."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


def _paths(value: Any) -> Any:
    """The same of paths, which may have spaces."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _pairs(value: Any) -> Any:
    """A table, or what the environment has for one: name=value, separated by commas."""
    if not isinstance(value, str):
        return value
    return {name.strip(): meaning.strip() for name, _, meaning in (part.rpartition("=") for part in value.split(",") if part)}


def _host_and_port(value: str) -> str:
    """Judged before anything is made: a first start makes accounts and keys."""
    listen_address(value)
    return value


def listen_address(value: str) -> tuple[str, int]:
    """An IPv6 address stands in brackets. ValueError."""
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{value!r} is not HOST:PORT, like 127.0.0.1:8441")
    return host, int(port)


class Settings(Received):
    """All settings, with their defaults: docs/settings.md."""

    data_dir: Path = Field(default_factory=default_data_dir)
    listen: Annotated[str, AfterValidator(_host_and_port)] = "127.0.0.1:8441"
    base_url: str = ""
    auth: Literal["file", "pam"] = "file"
    pam_service: str = "login"
    # With auth = "pam" the host's groups whose members may call, by role; at least one has to be set.
    pam_admin_group: str = ""
    pam_operator_group: str = ""
    pam_viewer_group: str = ""
    # Where root's helper is asked (systemd: synvirt-helper.socket). None: what needs root is done in the service, as root.
    helper_socket: Path | None = None
    # OpenID Connect: who logs in on the page by another's accounts. Empty: nobody does. docs/operating.md
    oidc_issuer: Annotated[str, Field(pattern=r"^(https://[^\s?#@]+)?$")] = ""
    oidc_client_id: str = ""
    # Its file, so that no secret stands in the settings; None: a public client, which PKCE alone guards.
    oidc_client_secret_file: Path | None = None
    # As it is registered there: https://THIS-SERVICE{base_url}/login/oidc/callback
    oidc_redirect_uri: Annotated[str, Field(pattern=r"^(https?://[^\s?#@]+)?$")] = ""
    oidc_scopes: Annotated[tuple[str, ...], BeforeValidator(_words)] = ("openid", "profile", "email")
    # The claim that has a person's groups, and which role each gives: the table [oidc.roles] of the file.
    oidc_roles_claim: Annotated[str, Field(min_length=1)] = "groups"
    oidc_roles: Annotated[dict[str, Literal["viewer", "operator", "admin"]], BeforeValidator(_pairs)] = Field(
        default_factory=dict
    )
    # The claim that a person is called by here, as in the audit trail.
    oidc_name_claim: Annotated[str, Field(min_length=1)] = "preferred_username"
    # What the page calls the provider; empty: its host.
    oidc_label: Annotated[str, Field(max_length=60)] = ""
    # Of the provider's certificate; empty: this host's authorities say who it is.
    oidc_fingerprint_sha256: Annotated[str, Field(pattern=r"^(([0-9A-Fa-f]{2}:?){31}[0-9A-Fa-f]{2})?$")] = ""
    # Proxies (addresses, networks) whose X-Forwarded-For is believed, separated by commas: who fails is known by it.
    trusted_proxies: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    # Off only on a loopback address, behind a proxy of the operator's.
    tls: bool = True
    # None: a certificate made on first start, in {data_dir}/keyring.
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    # Empty: SQLite in data_dir. A PostgreSQL URL serves a fleet: postgresql://user@host/database
    database_url: str = ""
    # Names this host in the store, the same after each restart; with a database_url it has to be set, for each host its own.
    host_id: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[\w.-]+$")] = "local"
    # The name of the one that a plan goes to when it does not say; auto: zfs where a pool is set, else directory.
    destination: DestinationName = "auto"
    zfs_pool: str = ""
    zfs_namespace: str = "synvirt"
    # More of them, by name: tables [destinations.NAME] of the file.
    destinations: dict[DestinationName, DestinationSetting] = Field(default_factory=dict)
    # Empty: the embedded driver, qemu:///embed?root={data_dir}/libvirt. The appliance sets qemu:///system
    libvirt_uri: str = ""
    # Who guests of the embedded driver run as, where the service is root: auto: a user of the host's who can do nothing else
    # (libvirt-qemu, qemu), where there is one that reaches what guests need; root: as the service; or a user's name.
    qemu_user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]*$")] = "auto"
    jobs_at_once: Annotated[int, Field(ge=1, le=256)] = 4
    # How much of its memory and processors the guests of a wave may be promised here: memory once, since a guest that is short
    # of it fails; each processor to so many virtual ones.
    memory_overcommit: Annotated[float, Field(ge=0.1, le=16)] = 1.0
    cpu_overcommit: Annotated[float, Field(ge=0.1, le=64)] = 8.0
    # On each of its hosts: every job reads disks that the host's own guests need too.
    jobs_per_source: Annotated[int, Field(ge=1, le=256)] = 4
    # On all of them together: a vCenter answers for each, and carries what is read through it.
    jobs_per_source_in_all: Annotated[int, Field(ge=1, le=1024)] = 16
    # On each destination; of a shared one over all hosts of the fleet, which should say the same here.
    jobs_per_destination: Annotated[int, Field(ge=1, le=1024)] = 16
    # Backups and verifications, and as many restores and boot tests beside them. Each reads with a thread a core.
    backups_at_once: Annotated[int, Field(ge=1, le=64)] = 2
    # Of a fleet, which should say the same here.
    runs_per_repository: Annotated[int, Field(ge=1, le=256)] = 8
    # Of jobs on disks of a host that is lost, where their plan does not say. Jobs on a shared destination go on elsewhere.
    on_host_lost: Literal["wait", "restart_elsewhere"] = "wait"
    # None: what `make bench` found best for this many cores.
    copy_threads: Annotated[int, Field(ge=1, le=64)] | None = None
    # A migration, backup, restore, verification or collection that brings no byte for so long fails. Long: a compressed disk
    # that is taken up again is read from its beginning.
    copy_stalled_s: Annotated[float, Field(gt=0)] = 7200
    boot_timeout_s: Annotated[float, Field(gt=0)] = 600
    boot_check: Literal["any", "agent", "running"] = "any"
    # A guest without agent and console that has written to its disks again and again for so long has booted.
    boot_activity_s: Annotated[float, Field(ge=5, le=3600)] = 60
    upload_cap_bytes: Annotated[int, Field(gt=0)] = 20 * GIB
    # An upload that no job reads is removed after so long.
    upload_expires_days: Annotated[float, Field(gt=0, le=3650)] = 7
    # Ended migrations go after so many days, but for failed ones that kept their volumes. 0: never.
    keep_ended_days: Annotated[float, Field(ge=0, le=36500)] = 0
    # Entries of the audit trail go after so many days. 0: never.
    audit_keep_days: Annotated[float, Field(ge=0, le=36500)] = 730
    # Hosts that VMs may be read from by URL: names (nas.example, *.example), addresses, networks (10.0.0.0/8), separated by
    # commas. Empty: all but this host itself, link-local addresses and cloud metadata.
    remote_allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    # Hosts that sources and backup peers may be at, as above. Empty: all but link-local addresses and cloud metadata.
    source_allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    # Authorities (PEM) that are trusted beside the host's own when VMs are read by https.
    remote_ca_file: Path | None = None
    virtio_win_iso: Path = Path("/usr/share/virtio-win/virtio-win.iso")
    # Where rhsrvany.exe lies: virt-v2v puts it into a Windows guest to install the agent at the first start.
    virt_tools_dir: Path = Path("/usr/share/virt-tools")
    # How Hyper-V exports are imported: by an outside tool, by our own readers, or by the tool where it has the driver.
    vmcx_way: Literal["auto", "tool", "own"] = "auto"
    vmcx_tool: str = "virt-v2v"
    vmcx_tool_driver: str = "hyperv"
    vmcx_tool_arguments: str = "-i {driver} {source} -o local -os {folder} -of raw"
    vmcx_tool_timeout_s: Annotated[float, Field(gt=0)] = 86400
    # Files and folders that the tool reads beside the export and what packages install: it is confined. Separated by commas.
    vmcx_tool_reads: Annotated[tuple[Path, ...], BeforeValidator(_paths)] = ()
    # Folders that other SynVirts may keep their backups in, by name: tables [backup_offers.NAME] of the file.
    backup_offers: dict[DestinationName, BackupOfferSetting] = Field(default_factory=dict)
    # Folders that restore points may be exported to, beside {data_dir}/exports, separated by commas.
    backup_export_roots: Annotated[tuple[Path, ...], BeforeValidator(_paths)] = ()
    # Programs that webhooks of waves may name: tables [wave_commands.NAME] of the file.
    wave_commands: dict[DestinationName, WaveCommandSetting] = Field(default_factory=dict)
    # A signed receipt of each job that completes, with the SHA-256 of every 4 MiB of its volumes.
    receipts: bool = True
    # Who stamps them with the time (RFC 3161), and the certificates (PEM) that the stamps must lead up to.
    receipt_tsa: Annotated[str, Field(pattern=r"^(https?://[^\s@]+)?$")] = ""
    receipt_tsa_roots: Path = Path("/etc/ssl/certs/ca-certificates.crt")
    # Other hosts whose restore points are known to be theirs: lines of `synvirt receipt key`, one a host.
    backup_signers: Path | None = None
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
        """All that plans may name, the default first. BadRequest where the default is none of them."""
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
        return self.database_url or f"sqlite:///{self.data_dir / 'migrator.db'}"

    def check_host_id(self) -> None:
        """BadRequest, where hosts may share the store and this one has no name of its own."""
        if self.database_url.startswith("postgres") and "host_id" not in self.model_fields_set:
            raise BadRequest(
                "setting host_id: is required with a PostgreSQL database_url, since hosts are distinguished by it",
                hint='name each host, host_id = "kvm1" say; the jobs of earlier versions are those of host_id = "local"',
            )

    def check_oidc(self) -> None:
        """BadRequest, where an OpenID provider is named, and what nobody could log in without is not."""
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
    """Flags over environment over file over defaults. BadRequest names the setting that is wrong, and where it stands."""
    layers = list(_layers(config, os.environ if environ is None else environ, flags or {}))
    values = {name: value for layer in layers for name, (value, _) in layer.items()}
    try:
        # Frozen strictness is for callers' JSON; the environment has only strings, so this mode is lax about types.
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "_".join(str(part) for part in first["loc"])
        origin = _origins(layers).get(str(first["loc"][0]), "")
        stands = f" ({origin})" if origin else ""
        near = did_you_mean(where, Settings.model_fields) if first["type"] == "extra_forbidden" else None
        hint = near or "docs/settings.md lists every setting"
        raise BadRequest(f"setting {where}{stands}: {worded(first)}", hint=hint) from None


def origins(
    *, config: Path | None = None, environ: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Where each setting that is not at its default came from: `FILE`, `environment SYNVIRT_…`, `--option`. As `load`."""
    return _origins(list(_layers(config, os.environ if environ is None else environ, flags or {})))


def service_config(environ: Mapping[str, str] | None = None) -> Path | None:
    """The settings file of a command that names no file and no folder: SYNVIRT_CONFIG, else that of this host's service."""
    environ = os.environ if environ is None else environ
    if "SYNVIRT_CONFIG" in environ:
        return Path(environ["SYNVIRT_CONFIG"])
    if "SYNVIRT_DATA_DIR" in environ:
        return None
    return next((path for path in SERVICE_CONFIGS if os.access(path, os.R_OK)), None)


# A setting's value, and where it came from.
_Layer = dict[str, tuple[Any, str]]


def _layers(config: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Iterator[_Layer]:
    """The later ones count more."""
    chosen = config or (Path(environ["SYNVIRT_CONFIG"]) if "SYNVIRT_CONFIG" in environ else None)
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
        return tomllib.loads(path.read_text())
    except OSError as error:
        hint = hint_for(path, error)
        raise BadRequest(f"settings file {path} cannot be read: {error.strerror}", hint=hint) from error
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"settings file {path}: {error}") from error


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and key not in ("destinations", "backup_offers", "wave_commands"):
            flat.update({f"{key}_{inner}": item for inner, item in value.items()})
        else:
            flat[key] = value
    return flat


def prepare_data_dir(settings: Settings) -> None:
    """Make {data_dir} and its folders with the modes of specification part 8. Idempotent. BadRequest, as `check_host_id`."""
    settings.check_host_id()
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
    # A libvirtd's QEMU is another user, who has to get through to its volumes; the embedded driver's is the service's.
    through = 0o001 if settings.libvirt_uri else 0
    if settings.data_dir.stat().st_uid == os.geteuid():
        settings.data_dir.chmod(stat.S_IMODE(settings.data_dir.stat().st_mode) | through)
    for folder, mode in (
        (settings.imports_dir, 0o750),
        (settings.uploads_dir, 0o750),
        (settings.keyring_dir, 0o700),
        (settings.volumes_dir, 0o750 | through),
    ):
        folder.mkdir(exist_ok=True, mode=mode)
        folder.chmod(mode)  # mkdir's mode is subject to the umask
