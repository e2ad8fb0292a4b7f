#!/bin/sh
# Make what tests/services needs beyond `make setup`: programs from Debian, and the package's extra `services`.
#
#   sh tools/services.sh                       VENV=.venv sh tools/services.sh
#   sh tools/services.sh slurm                 # also Slurm and MPI, and the extra `slurm`, for `make soak`
#   sh tools/services.sh programs              # without the extra, before there is a .venv
#
# Only what is missing is installed, as root or with a sudo that does not ask; otherwise this says what to install.
set -eu

VENV=${VENV:-.venv}
# program=package; both browser packages come from one source, so driver and browser always fit
PROGRAMS="chromium-headless-shell=chromium-headless-shell chromedriver=chromium-driver etcd=etcd-server nats-server=nats-server prometheus=prometheus prometheus-alertmanager=prometheus-alertmanager"
DAEMONS="etcd nats-server prometheus"  # their packages would have the machine run them, too
EXTRA=services
if [ "${1:-}" = slurm ]; then
    PATH="$PATH:/usr/sbin"
    # Slurm opens libpmix.so by that name, which Debian has among what is for developers
    PROGRAMS="$PROGRAMS slurmctld=slurmctld slurmd=slurmd srun=slurm-client munged=munge mpirun=openmpi-bin /usr/lib/$(uname -m)-linux-gnu/pmix2/lib/libpmix.so=libpmix-dev"
    DAEMONS="$DAEMONS slurmctld slurmd munge"
    EXTRA="services slurm"
elif [ "${1:-}" = programs ]; then
    EXTRA=
fi
cd "$(dirname "$0")/.."

say() { printf '%s services | %s\n' "$(date +%H:%M:%S)" "$*"; }
fail() { printf '\nservices: %s\n' "$*" >&2; exit 2; }

missing_packages() {
    for pair in $PROGRAMS; do
        command -v "${pair%%=*}" >/dev/null || [ -e "${pair%%=*}" ] || printf '%s ' "${pair##*=}"
    done
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# Return options of apt-get that leave out what a service manager starts: tests start their own.
without_services() {
    for daemon in $DAEMONS; do
        for folder in /lib/systemd/system /usr/lib/systemd/system /etc/init.d; do
            printf '%s ' "-oDpkg::Options::=--path-exclude=$folder/$daemon*"
        done
    done
}

can_be_root() { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }

install_packages() {
    packages=$(missing_packages)
    [ -n "$packages" ] || return 0
    wish="apt-get install --no-install-recommends $packages"
    command -v apt-get >/dev/null || fail "no apt-get here; install the equivalents of: $packages"
    can_be_root || fail "these packages are missing and only root may install them; run: sudo $wish"
    say "installing $packages"
    options=$(without_services)
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq || fail "apt-get update failed; its message stands above"
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $options $packages >/dev/null ||
        fail "apt-get could not install $packages; its message stands above"
    [ -z "$(missing_packages)" ] || fail "$(missing_packages)did not bring the programs that are needed ($PROGRAMS)"
}

install_extra() {
    stamp="$VENV/.stamp-$1-$(cksum <pyproject.toml | cut -d' ' -f1)"
    [ ! -e "$stamp" ] || return 0
    say "the package's extra [$1]"
    # Its requirements alone: the package is there, and making it again would fetch setuptools.
    "$VENV/bin/python" -c 'import importlib.metadata as m, sys
print(*(r.partition(";")[0] for r in m.requires("bireme") if f"extra == \"{sys.argv[1]}\"" in r), sep="\n")' "$1" >"$VENV/$1.txt"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet -r "$VENV/$1.txt" ||
        fail "pip could not install the extra; its message stands above"
    rm -f "$VENV/.stamp-$1"-*
    : >"$stamp"
}

install_packages
for extra in $EXTRA; do
    install_extra "$extra"
done
