"""Lists on the benchmarks' command lines, and their charts."""

import argparse
import builtins

import pytest

from benchmarks.chart import Panel, draw
from benchmarks.options import chosen, numbers


def test_numbers_and_names_are_separated_by_commas():
    assert numbers(int)("1,16,64") == [1, 16, 64] and numbers(float)("0,2.5") == [0.0, 2.5]
    assert chosen(("bus", "decode"))("decode,bus") == ["decode", "bus"]


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(argparse.ArgumentTypeError, match=r"^tram, ship; known: bus, decode$"):
        chosen(("bus", "decode"))("bus,tram,ship")


def test_a_chart_is_a_png(tmp_path):
    panels = [Panel("5 ms a step", {"bus": [(64, 2.0), (1, 1.0)], "nobody": []})]
    draw(str(tmp_path / "chart.png"), panels, "tokens/s")
    assert (tmp_path / "chart.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_there_is_no_chart_and_that_is_said(tmp_path, monkeypatch, capsys):
    plain = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    draw(str(tmp_path / "chart.png"), [], "tokens/s")
    assert "matplotlib is not installed" in capsys.readouterr().err and not list(tmp_path.iterdir())
