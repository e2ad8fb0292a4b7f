#!/bin/sh
# Make the base of docker/Dockerfile from Debian's packages, where no registry is within reach: needs mmdebstrap.
#
#   sh docker/make_base.sh base.tar                  Debian 12 of the machine's architecture
#   buildah from scratch, then buildah add: docs/images.md has the lines
#
# What Docker's own debian:bookworm-slim is made of: the required packages, without manuals, translations and documents
# but their licenses. As another user than root it works where user namespaces do.
set -eu

target=${1:?"make_base: name the file to write, base.tar"}
suite=${2:-bookworm}
command -v mmdebstrap >/dev/null || { echo "make_base: no mmdebstrap here; run: apt-get install mmdebstrap" >&2; exit 2; }
exec mmdebstrap --quiet --variant=minbase --format=tar \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/info/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    "$suite" "$target"
