#!/bin/sh
# Make a venv over the packed site: tests/gpu/unpack.sh ARCHIVE FOLDER REPOSITORY
# Several venvs may share a FOLDER's site; each has its own REPOSITORY. Prints the venv's path.
set -eu
archive=$1 folder=$2 repository=$(cd "$3" && pwd)
mkdir -p "$folder"
[ -d "$folder/site" ] || tar -xJf "$archive" -C "$folder"
venv="$folder/venv-$(basename "$repository")"
python3 -m venv --without-pip "$venv"
printf '%s\n%s\n' "$folder/site" "$repository" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/bireme.pth"
echo "$venv"
