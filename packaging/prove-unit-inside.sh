# What packaging/prove-unit.sh runs in its container, as root, by sh -eux.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
virsh() { command virsh -q -c qemu:///system "$@"; }
api() { curl -sk -o /dev/null -w '%{http_code}' -u "$1" https://127.0.0.1:8441/api/v1/migrator/migrations; }
serves() { for _ in $(seq 120); do synvirt migrations list >/dev/null 2>&1 && return; sleep 1; done; journalctl -u synvirt --no-pager; false; }
point_of() { synvirt backup points --json | python3 -c "import json,sys; print(next(i['id'] for i in json.load(sys.stdin)['items'] if i['vm_name'] == '$1'))"; }

# What was root's is the service's, and what is QEMU's stays so.
test "$(stat -c %U:%a /var/lib/synvirt/keyring)" = synvirt:750
test "$(stat -c %U /var/lib/synvirt/volumes/running.raw)" = libvirt-qemu
rm /var/lib/synvirt/volumes/running.raw
ip link set lo up
virsh net-start default
mkdir /srv/backups
mkdir -p /etc/systemd/system/synvirt.service.d
printf '[Service]\nReadWritePaths=/srv/backups\n' > /etc/systemd/system/synvirt.service.d/here.conf
systemctl daemon-reload
systemctl enable --now synvirt
serves
pid=$(systemctl show -p MainPID --value synvirt)
test "$(ps -o user= -p "$pid")" = synvirt
grep -q 'CapBnd:.*00000000000000eb' "/proc/$pid/status"
test "$(nsenter -t "$pid" -m -- sh -c 'cat /etc/shadow 2>/dev/null | wc -c')" = 0
synvirt doctor || true

# Passwords, by the helper.
useradd -M -G synvirt-admin eve
useradd -M mallory
printf 'eve:S3cret\nmallory:S3cret\n' | chpasswd
test "$(api eve:S3cret)" = 200
test "$(api eve:wrong)" = 401
test "$(api mallory:S3cret)" = 401

# An import; its guest is libvirtd's, and QEMU is its user.
install -m 644 /root/sample/*.ova /var/lib/synvirt/imports/sample.ova
synvirt import sample.ova --name web --wait
virsh domstate web | grep running
ps -C qemu-system-x86_64 -o user:20= | grep -x libvirt-qemu

# A guest with a disk, UEFI variables and a TPM that are QEMU's, swtpm's and root's.
qemu-img create -q -f qcow2 /var/lib/libvirt/images/own.qcow2 64M
chmod 600 /var/lib/libvirt/images/own.qcow2
dd if=/dev/urandom of=/root/data bs=1M count=8 status=none
qemu-io -f qcow2 -c 'write -s /root/data 1M 8M' /var/lib/libvirt/images/own.qcow2
cat > /root/own.xml <<'XML'
<domain type='qemu'><name>own</name><memory unit='MiB'>256</memory><vcpu>1</vcpu>
<os firmware='efi'><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/><smm state='on'/></features>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='/var/lib/libvirt/images/own.qcow2'/><target dev='vda' bus='virtio'/></disk>
<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm><memballoon model='none'/></devices></domain>
XML
virsh define /root/own.xml
virsh start own
synvirt backup add-repository /srv/backups --name here
synvirt backup add-job own --name own --repository here --quiesce off
synvirt backup add-job web --name web --repository here --quiesce off
synvirt backup run own
synvirt backup run web
virsh destroy own
synvirt backup run own
point=$(point_of own)
synvirt backup verify "$point"
synvirt backup restore "$point"
synvirt backup restore "$point" --target new-domain --name again --start
virsh domstate again | grep running
virsh destroy again
qemu-io -f qcow2 -c 'write -P 7 1M 8M' /var/lib/libvirt/images/own.qcow2
synvirt backup restore "$point" --target in-place
qemu-img convert -O raw /var/lib/libvirt/images/own.qcow2 /root/own.raw
cmp -n 8388608 -i 1048576:0 /root/own.raw /root/data
virsh start own
virsh destroy own
synvirt backup boot-test "$(point_of web)"

# Stopped and started again, it has all of it; guests have run on.
systemctl restart synvirt
serves
virsh domstate web | grep running
synvirt migrations remove "$(synvirt migrations list --json | python3 -c "import json,sys; print(json.load(sys.stdin)['items'][0]['id'])")" --volumes keep
journalctl -u synvirt --no-pager -o cat | grep '"error"' && exit 1
echo proven
