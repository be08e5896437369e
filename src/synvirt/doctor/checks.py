"""The table of all checks, in the order in which they are shown."""

from synvirt.doctor.domains import files_of_domains
from synvirt.doctor.finding import Check, always, program, programs, python_module, qemu_module
from synvirt.doctor.guests import (
    guests_user,
    hypervisor,
    is_system,
    kvm,
    libvirt_version,
    network,
    rehearsed_network,
    rhsrvany,
    uefi,
    virtio_win,
)
from synvirt.doctor.service import (
    authorities,
    cage_layer,
    credentials,
    data_dir,
    import_root,
    sealing_key,
    store,
    temporary_files,
    users_file,
)
from synvirt.doctor.sources import hyperv_tool, libnbd_version, libnfs, libsmbclient, libyal, nbdkit_vddk, pyvmomi_version
from synvirt.doctor.volumes import (
    librbd,
    mount_points_are_set,
    mounted,
    rbd_is_set,
    rbd_pools,
    zfs_is_set,
    zfs_pool,
    zfs_rights,
)
from synvirt.hypervisor.accel import EMULATOR

_DRIVERS = "https://fedorapeople.org/groups/virt/virtio-win/direct-downloads/stable-virtio/virtio-win.iso"
_VSPHERE = "vSphere as a live source"
_NUTANIX = "Nutanix AHV as a live source"
_WINDOWS = "Windows guests: their virtio drivers"
_READERS = "confining what reads images and copies disks"
# The layers of synvirt.cage: what each is for, and how a host gets it.
CAGE_LAYERS = {
    "no_new_privs": (f"{_READERS}: no program gives it more rights", "any Linux has it"),
    "limits": (f"{_READERS}: memory, files, processor time", "any Linux has it"),
    "network namespace": (f"{_READERS}: no network, where none is needed", "run the service as root, or rely on seccomp"),
    "user": (f"{_READERS}: another user than the service's", "run the service as root, as the package does"),
    "capabilities": (f"{_READERS}: root's rights dropped", "run the service as root, as the package does"),
    "landlock": (f"{_READERS}: no file but its own", "a kernel of 5.13 or newer with landlock in its list of security modules"),
    "seccomp": (f"{_READERS}: no programs, no sockets, no kernel interfaces", "a kernel with seccomp, on x86_64"),
}

CHECKS = (
    *(Check(f"cage: {name}", what_for, how, cage_layer(name)) for name, (what_for, how) in CAGE_LAYERS.items()),
    Check(
        "data_dir",
        "all that the service keeps",
        "make it, give it to the service's user, and keep space free there",
        data_dir,
        always,
    ),
    Check(
        "temporary files",
        "all programs that the service starts",
        "free space in /tmp, or set TMPDIR for the service: systemctl edit synvirt",
        temporary_files,
        always,
    ),
    Check("import root", "where files to import lie", "chown it to the service's user; chmod 0750", import_root, always),
    Check(
        "migrator.key", "seals the credentials of sources", "chown it to the service's user; chmod 0600", sealing_key, always
    ),
    Check(
        "users file",
        "who may log in",
        "synvirt password admin",
        users_file,
        lambda settings: settings.auth == "file",
    ),
    Check(
        "remote_ca_file",
        "trust in servers that files are read from by https",
        "put the authorities (PEM) there, or remove the setting",
        authorities,
        lambda settings: settings.remote_ca_file is not None,
    ),
    Check("store", "jobs, watermarks, sources, uploads", "setting database_url; or free the disk of data_dir", store, always),
    Check(
        "credentials",
        "the registered sources, which hosts of one database share",
        "copy keyring/migrator.key from the host that sealed them, or give them again: docs/operating.md, «Several hosts»",
        credentials,
    ),
    Check(
        "python3-libvirt",
        "the hypervisor",
        "apt-get install python3-libvirt",
        python_module("libvirt", libvirt_version),
        always,
    ),
    Check("libvirt", "the hypervisor", "apt-get install libvirt-daemon; setting libvirt_uri", hypervisor, always),
    Check(
        "guests' user",
        "confining guests: QEMU is not root",
        "apt-get install libvirt-daemon-system; chmod o+x the folders on the way; docs/guests.md; setting qemu_user",
        guests_user,
    ),
    Check(
        "domains' files",
        "guests that can be started again",
        "docs/operating.md#move-the-data-folder",
        files_of_domains,
        always,
    ),
    Check(EMULATOR, "runs the guests", "apt-get install qemu-system-x86", program(EMULATOR, "--version"), always),
    Check("kvm", "guests at full speed", "enable virtualisation in the host's firmware, or nesting where it is a guest", kvm),
    Check("ovmf", "guests with UEFI firmware", "apt-get install ovmf", uefi(secure=False)),
    Check("ovmf secure boot", "guests with secure boot", "apt-get install ovmf", uefi(secure=True)),
    Check("swtpm", "guests with a TPM", "apt-get install swtpm swtpm-tools", programs("swtpm", "swtpm_setup")),
    Check("network", "guests whose network the plan does not map", "virsh net-start default", network, is_system),
    Check(
        "tun",
        "a network for rehearsed guests",
        "modprobe tun; sysctl user.max_user_namespaces and user.max_net_namespaces above 0; docs/rehearsals.md",
        rehearsed_network,
    ),
    Check("qemu-img", "disk images of every sort", "apt-get install qemu-utils", program("qemu-img", "--version"), always),
    Check("qemu-nbd", "images our own readers refuse", "apt-get install qemu-utils", program("qemu-nbd", "--version"), always),
    Check(
        "pyvmomi",
        _VSPHERE,
        "make setup; in an environment of your own: pip install pyvmomi",
        python_module("pyvmomi", pyvmomi_version),
    ),
    Check(
        "nbdkit vddk",
        f"{_VSPHERE}, by VMware's own transport, the fastest one",
        "nbdkit-plugin-vddk (Debian 13, contrib) and VMware's VDDK; options.vddk_libdir: docs/platforms/vsphere.md",
        nbdkit_vddk,
    ),
    Check("libnfs", f"{_NUTANIX}, by NFS", "apt-get install libnfs13", libnfs),
    Check("qemu iscsi", f"{_NUTANIX}, by iSCSI", "apt-get install qemu-block-extra", qemu_module("block-iscsi")),
    Check("python3-libnbd", "reading over NBD", "apt-get install python3-libnbd", python_module("nbd", libnbd_version), always),
    Check(
        "ssh", "libvirt hosts and Proxmox VE as live sources", "apt-get install openssh-client", programs("ssh", "ssh-keyscan")
    ),
    Check("setpriv", "ssh to live sources; commands of waves", "apt-get install util-linux", program("setpriv")),
    Check(
        "systemd-creds",
        "copies of a repository's key that are bound to this host",
        "apt-get install systemd",
        program("systemd-creds"),
    ),
    Check(
        "syslinux",
        "the sample of synvirt demo",
        "apt-get install syslinux syslinux-common mtools e2fsprogs",
        programs("syslinux", "mformat", "mcopy", "mke2fs"),
    ),
    Check(
        "openssl",
        "time stamps of receipts",
        "apt-get install openssl",
        program("openssl", "version"),
        lambda settings: bool(settings.receipt_tsa),
    ),
    Check(
        "libyal",
        "what the disks say of a guest without an agent",
        "apt-get install python3-libfsext python3-libfsxfs python3-libfsntfs python3-libregf",
        libyal,
    ),
    Check("libsmbclient", "disks on SMB shares, at full speed", "apt-get install libsmbclient", libsmbclient),
    Check("mount points", "volumes in a folder of another file system", "mount it", mounted, mount_points_are_set),
    Check("zfs", "volumes on zfs", "apt-get install zfsutils-linux (contrib)", program("zfs", "version"), zfs_is_set),
    Check("zfs pool", "volumes on zfs", "zpool create; settings zfs_pool, zfs_namespace", zfs_pool, zfs_is_set),
    Check("zfs allow", "volumes on zfs, made by another user than root", "docs/zfs.md", zfs_rights, zfs_is_set),
    Check("blkdiscard", "zeros that take no room on zfs", "apt-get install util-linux", program("blkdiscard"), zfs_is_set),
    Check("virt-v2v-in-place", _WINDOWS, "apt-get install virt-v2v", program("virt-v2v-in-place", "--version")),
    Check("virtio-win.iso", _WINDOWS, f"{_DRIVERS}, put where the setting virtio_win_iso says", virtio_win),
    Check("rhsrvany", f"{_WINDOWS}, with the agent of virtio-win.iso", "docs/windows.md; setting virt_tools_dir", rhsrvany),
    Check("python3-rbd", "volumes in a Ceph pool", "apt-get install python3-rbd", librbd, rbd_is_set),
    Check(
        "qemu rbd",
        "guests on volumes in a Ceph pool",
        "apt-get install qemu-block-extra",
        qemu_module("block-rbd"),
        rbd_is_set,
    ),
    Check("ceph pool", "volumes in a Ceph pool", "docs/ceph.md", rbd_pools, rbd_is_set),
    Check(
        "virt-v2v hyperv",
        "Hyper-V exports by an outside tool, where our own readers are not to read them",
        "a virt-v2v with the input driver hyperv (Debian's has none), or settings vmcx_tool and vmcx_way",
        hyperv_tool,
        lambda settings: settings.vmcx_way == "tool",
    ),
)
