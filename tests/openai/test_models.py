"""/v1/models: what is served, and what each model reads and makes."""

import pytest

from bireme.errors import ConfigError
from bireme.openai.__main__ import make_server, parse
from bireme.openai.http.call import Call
from bireme.openai.http.error_replies import HttpError
from bireme.openai.model_kinds import TEXT
from bireme.openai.text.model_object import anthropic_page
from bireme.openai.video.served_video import VideoModels

MODALITIES = {
    "none": {"input_modalities": ["text"], "output_modalities": ["text"]},
    "models/tiny-chat": {"input_modalities": ["text"], "output_modalities": ["text"]},
    "models/tiny-vlm": {"input_modalities": ["text", "image"], "output_modalities": ["text"]},
}


@pytest.mark.parametrize("folder", MODALITIES)
async def test_a_model_says_whether_it_takes_pictures(frontend, folder):
    bench = await frontend(model=folder, workers={"decode": {"engine": "torch"}})
    listed = (await bench.call("GET", "/v1/models").end()).json()
    shown = (await bench.call("GET", "/v1/models/test").end()).json()
    assert listed == {"object": "list", "data": [shown]}
    assert shown["bireme"] == MODALITIES[folder]
    assert (shown["root"], shown["parent"]) == ("test", None)
    assert shown["permission"][0]["object"] == "model_permission" and shown["permission"][0]["allow_view"]


@pytest.mark.parametrize(("folder", "encodes"), [("models/tiny-chat", 0), ("models/tiny-vlm", 1)])
async def test_pictures_are_taken_by_the_models_that_say_so(frontend, folder, encodes):
    bench = await frontend(model=folder, workers={"decode": {"engine": "torch"}})
    part = {"type": "image_url", "image_url": {"url": "data:,x"}}
    reply = await bench.chat(messages=[{"role": "user", "content": [part]}]).end()
    assert sum("encode" in line for line in bench.workers.log) == encodes
    assert (b"this model reads text parts only" in reply.data) == (not encodes)


VERSION = {"anthropic-version": "2023-06-01"}


async def test_anthropics_clients_get_their_own_form_of_models_and_of_errors(frontend):
    from anthropic.pagination import SyncPage
    from anthropic.types import ModelInfo

    bench = await frontend()
    page = SyncPage[ModelInfo].model_validate_json((await bench.call("GET", "/v1/models", None, VERSION).end()).data)
    one = ModelInfo.model_validate_json((await bench.call("GET", "/v1/models/test", None, VERSION).end()).data)
    assert (page.data, page.has_more, page.first_id, page.last_id) == ([one], False, "test", "test")
    assert (one.id, one.display_name, one.type, one.created_at.tzname()) == ("test", "test", "model", "UTC")
    refused = await bench.call("GET", "/v1/models/other", None, VERSION).end()
    assert refused.status == 404 and refused.json()["error"]["type"] == "not_found_error"


PAGES = [
    ("limit=2", "ab", True), ("limit=2&after_id=b", "c", False), ("limit=1&before_id=c", "b", True),
    ("before_id=c", "ab", False), ("after_id=a&before_id=c", "b", False), ("after_id=c", "", False),
]  # fmt: skip


@pytest.mark.parametrize(("query", "ids", "has_more"), PAGES)
def test_anthropics_lists_are_paged_from_both_ends(query, ids, has_more):
    call = Call({"path": "/v1/models", "method": "GET", "headers": [], "query_string": query.encode()}, None, None)
    page = anthropic_page([{"id": name} for name in "abc"], call)
    assert ("".join(one["id"] for one in page["data"]), page["has_more"]) == (ids, has_more)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "after_id=x", "before_id=x", "page=2"])
async def test_a_wrong_page_of_anthropics_models_is_a_400_that_names_it(frontend, query):
    refused = await (await frontend()).call("GET", "/v1/models", None, VERSION, query=query).end()
    assert refused.status == 400 and refused.json()["error"]["message"].startswith(query.partition("=")[0])


def test_a_language_model_asked_for_a_video_says_what_it_makes_and_where():
    videos = VideoModels([])
    videos.know_others({"test": TEXT})
    with pytest.raises(HttpError, match="model: test makes text.*/v1/chat/completions") as told:
        videos.get("test")
    assert (told.value.status, told.value.code) == (400, "wrong_endpoint")


def test_recipes_of_one_frontend_have_the_same_buckets(tmp_path):
    for name, bound in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        metrics = f"metrics: {{buckets: {{bireme_queue_seconds: [{bound}]}}}}\n"
        (tmp_path / name / "recipe.yaml").write_text("model: m\nworkers: {decode: {engine: mocker}}\n" + metrics)
    options = parse(
        [f"--recipe={tmp_path}/one", "--grpc=127.0.0.1:1", f"--recipe={tmp_path}/two", "--grpc=127.0.0.1:2"]
    )
    with pytest.raises(ConfigError, match=r"two/recipe.yaml: metrics.buckets: not those of one"):
        make_server(options)
