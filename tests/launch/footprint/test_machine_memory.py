"""What a cgroup's limits leave of memory."""

from __future__ import annotations

import pytest

from bireme.launch.footprint import machine_memory
from bireme.launch.footprint.machine_memory import _cgroup_rooms, read_machine


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_each_limit_on_the_way_up_counts_and_pages_of_files_give_way(tmp_path):
    write(tmp_path / "a", memory__max="1000", memory__current="900", memory__stat="anon 1\ninactive_file 300")
    write(tmp_path / "a" / "b", memory__max="max", memory__current="10", memory__stat="inactive_file 0")
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert list(_cgroup_rooms(tmp_path, own)) == [400]


def test_the_first_version_s_limits_count_as_well(tmp_path):
    folder = tmp_path / "memory" / "a"
    write(folder, memory__limit_in_bytes="500", memory__usage_in_bytes="100", memory__stat="total_inactive_file 0")
    own = tmp_path / "own"
    own.write_text("9:cpu:/a\n8:memory:/a\n")
    assert list(_cgroup_rooms(tmp_path, own)) == [400]


def test_hidden_gpus_are_none(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-aa, 1000'; echo '1, GPU-bb, 2000'\n")
    program.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert read_machine({"PATH": path, "CUDA_VISIBLE_DEVICES": ""}).gpus == ()


@pytest.mark.parametrize(("refuses", "expected"), [("nothing", ((9, 0), (8, 6))), ("compute_cap", ())])
def test_gpus_are_told_with_their_compute_capability_where_the_driver_knows_it(
    tmp_path, monkeypatch, refuses, expected
):
    monkeypatch.setattr(machine_memory, "_is_torch_without_cuda", lambda: False)
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *{refuses}*) echo invalid; exit 2;; *compute_cap*) a=", 9.0"; b=", 8.6";; esac\n'
        'echo "0, GPU-aa, 1000$a"; echo "1, GPU-bb, 2000$b"\n'
    )
    program.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    machine, second = read_machine({"PATH": path}), read_machine({"PATH": path, "CUDA_VISIBLE_DEVICES": "GPU-bb"})
    assert (machine.gpus, machine.capabilities) == ((1000 << 20, 2000 << 20), expected)
    assert (second.gpus, second.capabilities) == ((2000 << 20,), expected[1:])
