"""The table of sampling parameters, and that every door reads it."""

import math
import re
from pathlib import Path

import msgspec
import pytest

import bireme.openai
from bireme.config import Limits, Recipe, WorkerEntry
from bireme.engines.child.validate import check_sampling
from bireme.errors import RequestError
from bireme.messages import SamplingParams
from bireme.openai.text.completion_request import CompletionBody
from bireme.parameters import BY_NAME, NAMES, PARAMETERS
from bireme.pipelines.chat_request import ChatBody
from bireme.pipelines.extensions import Extensions, NvExt
from bireme.sampling import parse_sampling

RECIPE = Recipe(model="m", workers={"decode": WorkerEntry(engine="mocker")})
RANGED = [row for row in PARAMETERS if row.is_field and row.has_range]
PLAYGROUND = Path(bireme.openai.__file__).parent / "playground" / "js" / "fields.js"
by_name = {"ids": lambda row: row.name}


def fields_of(kind):
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def middle_of(row):
    """Return a value inside the range that is not the neutral one, as JSON gives it."""
    return 2 if row.data_type != "FP32" and row.high > 2 else 0.5


def test_the_rows_are_the_fields_of_an_engine_s_parameters():
    of_the_entry = {"is_seed_drawn", "bad_token_ids", "end_id"}  # made of other values
    assert {row.name for row in PARAMETERS if row.is_field} == fields_of(SamplingParams) - of_the_entry


@pytest.mark.parametrize("row", RANGED, **by_name)
@pytest.mark.parametrize("place", ["tensor", "parameter", "recipe"])
def test_a_value_comes_through_from_every_place(row, place):
    recipe = msgspec.structs.replace(RECIPE, sampling={row.name: middle_of(row)} if place == "recipe" else {})
    values, parameters = ({row.name: middle_of(row)} if place == name else {} for name in ("tensor", "parameter"))
    assert getattr(parse_sampling(values, parameters, recipe).params, row.name) == middle_of(row)


@pytest.mark.parametrize("name", sorted(NAMES - {row.name for row in PARAMETERS if row.is_ignored} - {"lora_name"}))
def test_no_parameter_is_passed_over_in_silence(name):
    with pytest.raises(RequestError, match=name):
        parse_sampling({}, {name: [[]]}, RECIPE)


@pytest.mark.parametrize("row", [row for row in RANGED if math.isfinite(row.low)], **by_name)
def test_what_is_below_the_range_is_refused_by_entry_and_engine(row):
    below = (row.low if row.lowest is None else row.lowest) - 1
    with pytest.raises(RequestError, match=f"{row.name}: {below}; the range is"):
        parse_sampling({row.name: below}, {}, RECIPE)
    with pytest.raises(RequestError, match=f"{row.name}: {below}; "):
        check_sampling(SamplingParams(**{row.name: below}), 100, Limits())


@pytest.mark.parametrize("row", RANGED, **by_name)
def test_the_engine_lets_in_what_the_entry_lets_in(row):
    end = getattr(Limits(), row.limit) if row.limit else row.high
    for value in (row.low, end):
        if value is not None and math.isfinite(value) and not (row.is_low_open and value == row.low):
            params = parse_sampling({row.name: value}, {}, RECIPE).params
            check_sampling(msgspec.structs.replace(params, n=1), 100, Limits())


def test_requests_have_the_fields_that_the_table_says():
    for row in PARAMETERS:
        places = {"openai": (ChatBody, CompletionBody), "shared": (ChatBody, CompletionBody, Extensions)}
        for kind in places.get(row.api, (*places["shared"], NvExt) if row.api == "nvext" else ()):
            assert row.name in fields_of(kind)


def test_the_playground_s_fields_have_the_table_s_ranges():
    for block in re.findall(r"\{\s*name: .*?\}", PLAYGROUND.read_text(), re.DOTALL):
        found = dict(re.findall(r"(\w+): \"?([\w.-]+)", block))
        row = BY_NAME.get(found["name"].replace("max_completion", "max"))
        high = min(row.high, row.openai_high)
        assert float(found["min"]) == row.low and (found.get("isMinOpen") == "true") == row.is_low_open
        if row.name != "seed":  # JavaScript's largest integer is smaller
            assert float(found.get("max", "inf")) == high
