#!/bin/sh
# Prove the package's units under systemd itself: packaging/prove-unit.sh PACKAGE. Needs root, mmdebstrap and systemd-nspawn
# (systemd-container); takes some minutes.
# A Debian 12 with systemd, libvirtd and a root's data folder of an earlier version boots in a container without a network. There the
# service, which is not root, checks a password by its helper, imports an OVA, sees libvirtd's guest boot, and backs up, restores
# and boot-tests guests with UEFI variables and a TPM: packaging/prove-unit-inside.sh.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
package=$(readlink -f "$1")
root=$(mktemp -d /var/tmp/synvirt-unit.XXXXXX)
trap 'rm -rf --one-file-system "$root"' EXIT
trap 'exit 130' INT TERM
include=systemd-sysv,dbus,polkitd,udev,passwd,procps,iproute2,curl,libvirt-clients,libvirt-daemon-system-systemd
include=$include,libvirt-daemon-config-network,dnsmasq-base,iptables
set -- --include="$include" bookworm "$root"
for sources in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do
    [ -s "$sources" ] && set -- "$@" "$sources" && break # the host's own mirror is near
done
mmdebstrap --quiet --variant=apt "$@"
cp "$package" "$root/root/synvirt.deb"
cp "$here/prove-unit-inside.sh" "$root/root/prove.sh"
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
# As a service that was root left it.
mkdir -p -m 750 "$root/var/lib/synvirt/keyring" "$root/var/lib/synvirt/volumes"
echo of-qemu > "$root/var/lib/synvirt/volumes/running.raw"
unshare --mount --propagation private sh -eu -c '
    root=$1
    mount --rbind /dev "$root/dev"
    mount -t proc proc "$root/proc"
    mount -t tmpfs tmpfs "$root/run"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 HOME=/root
    chroot "$root" apt-get update -q=2
    chroot "$root" chown 64055 /var/lib/synvirt/volumes/running.raw
    chroot "$root" apt-get install -y -q=2 --no-install-recommends /root/synvirt.deb
    chroot "$root" /usr/lib/synvirt/bin/python3 -c \
        "from pathlib import Path; from synvirt.sample.appliance import build; build(Path(\"/root/sample\"), payload_mib=16)"
' prove "$root"
rm "$root/usr/sbin/policy-rc.d"
# A container has no control groups for libvirtd to make more in.
echo 'cgroup_controllers = []' >> "$root/etc/libvirt/qemu.conf"
cat > "$root/etc/systemd/system/prove.service" <<'UNIT'
[Unit]
After=libvirtd.service dbus.service systemd-logind.service
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'sh -eux /root/prove.sh > /root/said 2>&1; echo $? > /root/code'
UNIT
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -s ../prove.service "$root/etc/systemd/system/multi-user.target.wants/"
set --
for device in /dev/kvm /dev/net/tun; do
    [ -e "$device" ] && set -- "$@" --bind="$device"
done
timeout 1800 systemd-nspawn -q -D "$root" -b --register=no --keep-unit --private-network --capability=all --console=read-only \
    --system-call-filter="landlock_create_ruleset landlock_add_rule landlock_restrict_self" --link-journal=no "$@" \
    </dev/null >"$root/root/console" 2>&1 || true
[ -e "$root/root/said" ] && cat "$root/root/said" || tail -50 "$root/root/console"
[ "$(cat "$root/root/code")" = 0 ]
