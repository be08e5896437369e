#!/bin/sh
# Build the Debian package: packaging/build-deb.sh FOLDER. Prints the path of what it made there. After `make setup`; needs no root.
# The package has a virtual environment of Debian's own Python in /usr/lib/synvirt, with the locked packages, by hash: nothing is
# fetched on the host that it is installed on, but Debian's packages (packages.txt), which apt gets.
set -eu
umask 022
here=$(cd "$(dirname "$0")/.." && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
pip="$here/.venv/bin/pip"
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$here/pyproject.toml")
architecture=$(dpkg --print-architecture)
tree=$(mktemp -d)
chmod 755 "$tree"
tools=$(mktemp -d)
trap 'rm -rf "$tree" "$tools"' EXIT
# What the package says of itself does not hang on when it was built, but on what it was built from.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(stat -c %Y "$here/CHANGELOG.md")}
export SOURCE_DATE_EPOCH

# For the next build: kept FOLDER WHERE. Whole or not at all; another build may have made it meanwhile.
kept() {
    beside=$(mktemp -d "$2.XXXXXX")
    cp -a "$1/." "$beside" && chmod 755 "$beside"
    mv -T "$beside" "$2" 2>/dev/null || { rm -rf "$beside"; test -d "$2"; }
}

home=usr/lib/synvirt
packages=$home/lib/python3.11/site-packages
mkdir -p "$tree/DEBIAN" "$tree/$packages" "$tree/$home/bin" "$tree/usr/bin" "$tree/lib/systemd/system" "$tree/etc/synvirt" \
    "$tree/etc/apparmor.d" "$tree/usr/share/doc/synvirt"

# A virtual environment is a link to Python, and a file beside it that says so: made here, since `python3 -m venv` and pip write
# the path of where they are run into what they make. System packages, for Debian's libvirt and libnbd.
ln -s /usr/bin/python3.11 "$tree/$home/bin/python3"
ln -s python3 "$tree/$home/bin/python"
printf 'home = /usr/bin\ninclude-system-site-packages = true\nversion = 3.11\n' > "$tree/$home/pyvenv.cfg"
quiet="-q --disable-pip-version-check --no-input"
# The service cannot write there, so what is compiled comes along: compiled A_TREE A_FOLDER_IN_IT
compiled() {
    /usr/bin/python3.11 -m compileall -q -j 0 -x /tests/ --invalidation-mode unchecked-hash -s "$1" "$1/$2" >/dev/null || true
}
# What is locked stays for the next build, compiled: to install it takes a third of a build's time.
locked="$here/.venv/deb-$(sha256sum "$here/requirements.txt" | cut -c1-16)"
if ! test -d "$locked"; then
    "$pip" install $quiet --no-compile --no-deps --target "$tools/locked/$packages" --require-hashes -r "$here/requirements.txt"
    compiled "$tools/locked" "$packages"
    kept "$tools/locked" "$locked"
fi
cp -a "$locked/$packages/." "$tree/$packages"
"$pip" install $quiet --no-compile --no-deps --upgrade --target "$tree/$packages" "$here"
compiled "$tree" "$packages/synvirt"
rm -rf "$tree/$packages/bin" "$tree/$packages"/synvirt-*.dist-info/direct_url.json
"$tree/$home/bin/python3" -P "$here/packaging/launcher.py" | sed "s#$tree/#/#g" > "$tree/$home/bin/synvirt"
chmod 755 "$tree/$home/bin/synvirt"
ln -s ../lib/synvirt/bin/synvirt "$tree/usr/bin/synvirt"

for unit in synvirt.service synvirt-helper.socket synvirt-helper@.service; do
    sed -e 's#/opt/synvirt/.venv/bin/synvirt#/usr/bin/synvirt#' -e "s#/opt/synvirt/.venv/bin/python#/$home/bin/python3#" \
        -e 's#/etc/synvirt.toml#/etc/synvirt/synvirt.toml#' -e 's#/opt/synvirt/docs#/usr/share/doc/synvirt#' \
        "$here/packaging/systemd/$unit" > "$tree/lib/systemd/system/$unit"
done
sed -e 's#/etc/synvirt.toml#/etc/synvirt/synvirt.toml#' -e 's#docs/settings.md#/usr/share/doc/synvirt/settings.md#' \
    "$here/packaging/synvirt.toml" > "$tree/etc/synvirt/synvirt.toml"
chmod 640 "$tree/etc/synvirt/synvirt.toml"
install -m 644 "$here/packaging/apparmor/synvirt" "$tree/etc/apparmor.d/synvirt"
cp "$here"/docs/*.md "$tree/usr/share/doc/synvirt/"
# What it is made of, in CycloneDX: each locked package with its hashes. The tool has an environment of its own, which is not packed.
# It stays for the next build, with its byte code: to make it takes as long as all that is compiled above.
sbom="$here/.venv/sbom-$(sha256sum "$here/packaging/requirements-sbom.txt" | cut -c1-16)"
if ! test -d "$sbom"; then
    "$here/.venv/bin/python" -m venv --without-pip "$tools/env"
    "$pip" --python "$tools/env/bin/python" install $quiet --require-hashes -r "$here/packaging/requirements-sbom.txt"
    kept "$tools/env" "$sbom"
fi
# The tool takes four seconds to check what it wrote, so the list stays, too, until one of the files that it is read from changes.
bill="$sbom/$(cat "$here/requirements.txt" "$here/pyproject.toml" | sha256sum | cut -c1-16).json"
if ! test -f "$bill"; then
    "$sbom/bin/python" -m cyclonedx_py requirements "$here/requirements.txt" --pyproject "$here/pyproject.toml" --mc-type application \
        --output-reproducible --output-format JSON --output-file "$tools/bill" 2>"$tools/told" || { cat "$tools/told" >&2; exit 1; }
    cp "$tools/bill" "$bill.$$" && mv "$bill.$$" "$bill"
fi
install -m 644 "$bill" "$tree/usr/share/doc/synvirt/sbom.cdx.json"
gzip -9nc "$here/CHANGELOG.md" > "$tree/usr/share/doc/synvirt/changelog.gz"
{
    printf 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nCopyright: the authors of SynVirt\n'
    printf 'License: Apache-2.0\n On Debian systems, the full text is in /usr/share/common-licenses/Apache-2.0.\n\n'
    printf 'Comment: The Python packages in /%s have licences of their own,\n each in its .dist-info folder.\n' "$packages"
} > "$tree/usr/share/doc/synvirt/copyright"

for script in preinst postinst prerm postrm; do
    install -m 755 "$here/packaging/deb/$script" "$tree/DEBIAN/$script"
done
printf '/etc/synvirt/synvirt.toml\n/etc/apparmor.d/synvirt\n' > "$tree/DEBIAN/conffiles"
# Debian's Python, of the version that the compiled packages are for; what `make setup` installs; and no venv to be made.
depends=$(sed 's/#.*//' "$here/packaging/packages.txt" | grep -v '^python3-venv' | tr -s ' \n' '\n' | sed '/^$/d' | paste -sd, | sed 's/,/, /g')
cat > "$tree/DEBIAN/control" <<CONTROL
Package: synvirt
Version: $version
Architecture: $architecture
Section: admin
Priority: optional
Maintainer: SynVirt <root@localhost>
Installed-Size: $(du -sk --exclude=DEBIAN "$tree" | cut -f1)
Depends: python3 (>= 3.11), python3 (<< 3.12), $depends
Recommends: zfsutils-linux, virt-v2v
Description: moves virtual machines to a KVM host, from other platforms and files
 Imports virtual machines from other platforms and from files into this
 host's KVM, by an HTTP API, a page and a command line, cold or warm; and
 backs them up. Nothing is started when it is installed: look at
 /etc/synvirt/synvirt.toml, then systemctl enable --now synvirt
CONTROL
(cd "$tree" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum > DEBIAN/md5sums)
package="$out/synvirt_${version}_$architecture.deb"
export DPKG_DEB_COMPRESSOR_LEVEL="${DPKG_DEB_COMPRESSOR_LEVEL:-6}"
dpkg-deb --root-owner-group -Zzstd --build "$tree" "$package" >/dev/null
echo "$package"
