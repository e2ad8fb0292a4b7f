"""/v1/models: what is served, and what each model reads and makes."""

import pytest

from bireme.openai.http.error_replies import HttpError
from bireme.openai.model_kinds import TEXT
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


def test_a_language_model_asked_for_a_video_says_what_it_makes_and_where():
    videos = VideoModels([])
    videos.know_others({"test": TEXT})
    with pytest.raises(HttpError, match="model: test makes text.*/v1/chat/completions") as told:
        videos.get("test")
    assert (told.value.status, told.value.code) == (400, "wrong_endpoint")
