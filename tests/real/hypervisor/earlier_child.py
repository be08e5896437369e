"""A service of an earlier version: its own qemu.conf, then a guest; and it goes, and leaves the guest. As guest_child.py."""

from synvirt.kvm import connection, qemu_user
from tests.real.hypervisor.guest_child import main

if __name__ == "__main__":
    connection.QEMU_CONF_AS_WE = "dynamic_ownership = 0\n"
    connection.QEMU_CONF_AS_ROOT = 'user = "root"\ngroup = "root"\nswtpm_user = "root"\nswtpm_group = "root"\n'
    vars(qemu_user)["of"] = lambda uri: None
    main()
