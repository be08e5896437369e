"""libvirt_remote: KVM hosts by libvirt. adapter.py is the LiveAdapter; the other files are its parts:

form.py         endpoint, credentials, options     ssh.py, pki.py  access to the host
host.py         the connection and its calls
domain.py       a domain's XML as facts            manifest.py     facts as a VmManifest
backup.py       pull-mode backups, checkpoints     scratch.py      their scratch files
freeze.py       the guest agent's freeze and thaw  variables.py    UEFI variables
"""
