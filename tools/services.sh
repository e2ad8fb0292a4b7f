#!/bin/sh
# Make what tests/services needs beyond `make setup`: programs from Debian, and the package's extra `services`.
#
#   sh tools/services.sh                       VENV=.venv sh tools/services.sh
#
# Only what is missing is installed, as root or with a sudo that does not ask; otherwise this says what to install.
set -eu

VENV=${VENV:-.venv}
# program=package; both browser packages come from one source, so driver and browser always fit
PROGRAMS="chromium-headless-shell=chromium-headless-shell chromedriver=chromium-driver etcd=etcd-server nats-server=nats-server"
# Of these the programs alone are unpacked, into VENV/services: their packages would start services of the machine.
UNPACKED="prometheus=prometheus promtool=prometheus prometheus-alertmanager=prometheus-alertmanager"
cd "$(dirname "$0")/.."

say() { printf '%s services | %s\n' "$(date +%H:%M:%S)" "$*"; }
fail() { printf '\nservices: %s\n' "$*" >&2; exit 2; }

missing_packages() {
    for pair in $PROGRAMS; do
        command -v "${pair%%=*}" >/dev/null || printf '%s ' "${pair##*=}"
    done
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

can_be_root() { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }

install_packages() {
    packages=$(missing_packages)
    [ -n "$packages" ] || return 0
    wish="apt-get install --no-install-recommends $packages"
    command -v apt-get >/dev/null || fail "no apt-get here; install the equivalents of: $packages"
    can_be_root || fail "these packages are missing and only root may install them; run: sudo $wish"
    say "installing $packages"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq || fail "apt-get update failed; its message stands above"
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null ||
        fail "apt-get could not install $packages; its message stands above"
    [ -z "$(missing_packages)" ] || fail "$(missing_packages)did not bring the programs that are needed ($PROGRAMS)"
}

missing_unpacked() {
    for pair in $UNPACKED; do
        program=${pair%%=*}
        command -v "$program" >/dev/null || [ -x "$VENV/services/usr/bin/$program" ] || echo "${pair##*=}"
    done | sort -u | tr '\n' ' '
}

download() {
    # shellcheck disable=SC2086
    (cd "$1" && apt-get download -qq $packages >errors 2>&1)
}

unpack_programs() {
    packages=$(missing_unpacked)
    [ -n "$packages" ] || return 0
    command -v apt-get >/dev/null || fail "no apt-get here; install the equivalents of: $packages"
    say "unpacking $packages"
    folder=$(mktemp -d)
    if ! download "$folder" && can_be_root; then
        as_root apt-get update -qq || fail "apt-get update failed; its message stands above"
        download "$folder" || true
    fi
    mkdir -p "$VENV/services"
    for package in "$folder"/*.deb; do
        [ -e "$package" ] || fail "apt-get could not download $packages: $(cat "$folder/errors")"
        dpkg-deb --fsys-tarfile "$package" | tar -x -C "$VENV/services" ./usr/bin
    done
    rm -r "$folder"
    [ -z "$(missing_unpacked)" ] || fail "$(missing_unpacked)did not bring the programs that are needed ($UNPACKED)"
}

install_extra() {
    stamp="$VENV/.stamp-services-$(cksum <pyproject.toml | cut -d' ' -f1)"
    [ ! -e "$stamp" ] || return 0
    say "the package's extra [services]"
    # Its requirements alone: the package is there, and making it again would fetch setuptools.
    "$VENV/bin/python" -c 'import importlib.metadata as m
print(*(r.partition(";")[0] for r in m.requires("bireme") if "extra == \"services\"" in r), sep="\n")' >"$VENV/services.txt"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet -r "$VENV/services.txt" ||
        fail "pip could not install the extra; its message stands above"
    rm -f "$VENV"/.stamp-services-*
    : >"$stamp"
}

install_packages
unpack_programs
install_extra
