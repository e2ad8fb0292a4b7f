"""Videos by the trained sample model on a real deployment: over gRPC, in one call, and as jobs."""

from __future__ import annotations

import base64
import io
import json
import time

import numpy as np
import openai
import pytest

from models.training.video_world import read
from tests.server.openai_served import engine_of, kill, served, wait_for
from tests.server.video_served import (
    PORTS,
    PROMPT,
    URL,
    Background,
    call,
    decode,
    generate,
    num_steps,
    request,
    settled_steps,
    stream,
)

pytestmark = pytest.mark.server
LONG = {"prompt": PROMPT, "num_inference_steps": 100, "num_frames": 33}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("video")
    override = json.dumps({"video": {"folder": str(folder), "max_queue_size": 2}})
    log = folder / "serve.log"
    with served("recipes/tiny-video", log, "--override", override, ports=PORTS) as running:
        yield running


@pytest.fixture
def client(deployment):
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def job_status(job_id):
    return call("GET", f"/v1/videos/{job_id}")[1]["status"]


def start_long_job():
    """Return the id of a job that is under way."""
    status, job = call("POST", "/v1/videos", LONG)
    assert status == 200, job
    wait_for(lambda: call("GET", f"/v1/videos/{job['id']}")[1]["progress"] > 0, 60)
    return job["id"]


def test_a_clip_comes_over_grpc_with_progress_and_the_frames_and_rate_asked_for(deployment):
    answers = list(stream("video_diffusion", prompt=PROMPT, num_frames=16, fps=8, num_inference_steps=4, seed=3))
    steps = [one["step"] for one in answers if "eta_s" in one]  # of several that wait to be sent only the last is
    assert steps == sorted(steps) and set(steps) <= set(range(5)) and steps[-1] == 4
    frames, rate = decode(answers[-1]["video"])
    assert frames.shape == (16, 64, 64, 3) and rate == 8
    details = json.loads(answers[-1]["details"])
    assert (details["num_frames"], details["generated_frames"], details["seed"]) == (16, 17, 3)


def test_raw_frames_come_as_a_tensor(deployment):
    answer = list(stream("video_diffusion", prompt=PROMPT, num_frames=9, num_inference_steps=2, output_format="frames"))
    assert answer[-1]["frames"].shape == (9, 64, 64, 3) and answer[-1]["frames"].dtype == np.uint8


def test_the_video_pipeline_answers_over_grpc(deployment):
    body = json.dumps({"prompt": PROMPT, "seconds": "2", "num_inference_steps": 3})
    *news, answer = [json.loads(one["response"]) for one in stream("video", request=body)]
    assert [one["step"] for one in news][-1] == 3 and news[-1]["object"] == "video.progress"
    frames, rate = decode(base64.b64decode(answer["data"][0]["b64_json"]))
    assert len(frames) == 16 and rate == 8 and answer["seconds"] == 2


def test_one_call_makes_what_the_prompt_says(deployment):
    status, answer = generate(seed=1, num_frames=17)
    frames, _ = decode(base64.b64decode(answer["data"][0]["b64_json"]))
    assert status == 200 and answer["status"] == "completed" and len(frames) == 17
    assert read(frames).background == "black"  # the one feature that the model's card promises


def test_the_same_seed_makes_the_same_clip_and_another_seed_another(deployment):
    first, again, other = (frames_of(generate(seed=seed, num_inference_steps=3)[1]) for seed in (5, 5, 6))
    assert is_same(first, again) and not is_same(first, other)


def frames_of(answer):
    """Return the frames of an answer in one call, or of the last response over gRPC."""
    video = answer["video"] if "video" in answer else base64.b64decode(answer["data"][0]["b64_json"])
    return decode(video)[0].astype(int)


def is_same(one, other):
    """Whether clips are equal up to rounding (0.0002 of 255 on average were seen; two seeds are 10 apart)."""
    return np.abs(one - other).mean() < 0.1


def test_progress_comes_as_events(deployment):
    body = {"prompt": PROMPT, "num_inference_steps": 12, "stream": True, "response_format": "url"}
    status, data = request("POST", "/v1/videos/generations", body)
    *events, last = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line.startswith("data: ")]
    trees = [json.loads(event) for event in events]
    assert status == 200 and last == "[DONE]"
    steps = [tree["step"] for tree in trees[:-1]]  # of several that wait to be written only the last is
    assert steps == sorted(steps) and len(set(steps)) > 1 and trees[-1]["progress"] == 100
    path = trees[-1]["data"][0]["url"].removeprefix(URL)
    assert decode(request("GET", path)[1])[0].shape[0] == 17
    assert request("GET", path, range="bytes=0-9")[0] == 206


def test_a_job_is_followed_and_fetched_with_the_official_client(client):
    job = client.videos.create(prompt=PROMPT, seconds="4", extra_body={"num_inference_steps": 6, "fps": 4})
    assert job.status in ("queued", "in_progress") and job.seconds == "4"
    job = client.videos.poll(job.id, poll_interval_ms=100)
    assert job.status == "completed" and job.progress == 100
    frames, rate = decode(client.videos.download_content(job.id).content)
    assert len(frames) == 16 and rate == 4
    assert job.id in [one.id for one in client.videos.list(limit=5).data]
    assert client.videos.delete(job.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(job.id)


def test_pages_of_jobs_follow_each_other(client):
    made = [call("POST", "/v1/videos", {"prompt": PROMPT, "num_inference_steps": 1})[1]["id"] for _ in range(3)]
    wait_for(lambda: {job_status(one) for one in made} == {"completed"}, 60)
    found = [job.id for job in client.videos.list(limit=2)]  # asks for further pages itself
    assert found[:3] == made[::-1]
    assert [job.id for job in client.videos.list(order="asc", after=made[0], limit=2).data] == made[1:]


def clip(seed):
    return list(stream("video_diffusion", prompt=PROMPT, num_inference_steps=6, num_frames=9, seed=seed))


def waited(answers):
    """Whether the first news of a request was that another goes first."""
    return next(one["queue_position"] for one in answers if "queue_position" in one) == 1


def test_two_requests_at_once_are_served_in_turn_and_both_rightly(deployment):
    alone = [clip(seed) for seed in (11, 12)]
    assert not any(map(waited, alone))
    together = [one.wait() for one in [Background(lambda seed=seed: clip(seed)) for seed in (11, 12)]]
    assert all(is_same(frames_of(one[-1]), frames_of(other[-1])) for one, other in zip(together, alone, strict=True))
    assert not is_same(*(frames_of(answers[-1]) for answers in alone))
    assert sorted(map(waited, together)) == [False, True]


def test_jobs_that_wait_are_queued_and_a_full_queue_refuses(deployment):
    job = start_long_job()
    waiting = [call("POST", "/v1/videos", LONG)[1] for _ in range(2)]
    assert [one["status"] for one in waiting] == ["queued", "queued"]
    assert [call("GET", f"/v1/videos/{one['id']}")[1]["status"] for one in waiting] == ["queued", "queued"]
    status, answer = generate()
    assert status == 503 and "video.max_queue_size is 2" in answer["error"]["message"]
    for one in (*(one["id"] for one in waiting), job):
        assert call("DELETE", f"/v1/videos/{one}")[0] == 200
    wait_for(lambda: generate(num_inference_steps=1, num_frames=5)[0] == 200, 60)  # the queue is free again


def test_deleting_a_job_stops_it(deployment):
    began = settled_steps()
    job = start_long_job()
    assert call("DELETE", f"/v1/videos/{job}")[0] == 200
    assert generate(num_inference_steps=1, num_frames=5)[0] == 200  # the pipeline is free again
    before = settled_steps()
    assert 1 < before - began < 100
    time.sleep(1.5)
    assert num_steps() == before


def test_a_client_that_leaves_stops_its_generation(deployment):
    answers = stream("video_diffusion", prompt=PROMPT, num_inference_steps=100, num_frames=33)
    for answer in answers:
        if answer.get("step", 0) >= 2:
            break
    answers.close()
    assert generate(num_inference_steps=1, num_frames=5)[0] == 200
    before = settled_steps()
    time.sleep(1.5)
    assert num_steps() == before


def test_an_abort_by_request_id_ends_a_request_after_the_step_under_way(deployment):
    answers = stream("video_diffusion", prompt=PROMPT, num_inference_steps=100, num_frames=33, request_id="mine")
    next(answer for answer in answers if answer.get("step", 0) >= 1)
    steps = []

    def follow():
        with pytest.raises(Exception, match="CANCELLED"):
            for answer in answers:
                steps.append(answer["step"])
        return True

    following = Background(follow)
    list(stream("video_diffusion", request_id="mine", abort=True))
    before = len(steps)
    assert following.wait() and len(steps) <= before + 2  # one may have been on its way to this client


def test_pictures_are_made_by_the_same_pipeline(client):
    from PIL import Image

    answer = client.images.generate(
        prompt="a large green square", n=2, size="64x64", response_format="b64_json", extra_body={"seed": 4}
    )
    pictures = [Image.open(io.BytesIO(base64.b64decode(one.b64_json))) for one in answer.data]
    assert [picture.size for picture in pictures] == [(64, 64)] * 2 and pictures[0].format == "PNG"
    alone = client.images.generate(prompt="a large green square", size="64x64", extra_body={"seed": 5})
    assert alone.data[0].b64_json == answer.data[1].b64_json  # each picture has a seed of its own


MALFORMED = [
    ("/v1/videos", b"{", "not valid JSON"),
    ("/v1/videos", {}, "prompt: missing"),
    ("/v1/videos", {"prompt": "  "}, "prompt: empty"),
    ("/v1/videos", {"prompt": "x", "size": "big"}, "WIDTHxHEIGHT"),
    ("/v1/videos", {"prompt": "x", "size": "100x64"}, "multiples of 16"),
    ("/v1/videos", {"prompt": "x", "size": "4096x4096"}, "video.max_width"),
    ("/v1/videos", {"prompt": "x", "seconds": "soon"}, "seconds: 'soon'"),
    ("/v1/videos", {"prompt": "x", "seconds": "600"}, "video.max_frames"),
    ("/v1/videos", {"prompt": "x", "num_frames": 0}, "num_frames: 0 frames; 1 to"),
    ("/v1/videos", {"prompt": "x", "num_frames": 9, "seconds": 1}, "num_frames: with seconds"),
    ("/v1/videos", {"prompt": "x", "fps": 1000}, "fps: 1000"),
    ("/v1/videos", {"prompt": "x", "num_inference_steps": 100000}, "video.max_steps"),
    ("/v1/videos", {"prompt": "x", "guidance_scale": -1}, "guidance_scale: -1"),
    ("/v1/videos", {"prompt": "x", "seed": -1}, "seed"),
    ("/v1/videos", {"prompt": "x", "input_reference": "data:"}, "made from text alone"),
    ("/v1/videos", {"prompt": "x", "frames": 9}, "frames: unknown field"),
    ("/v1/videos", {"prompt": "x", "model": "sora"}, "The model `sora` does not exist"),
    ("/v1/videos/generations", {"prompt": "x", "output_format": "avi"}, "one of mp4, gif"),
    ("/v1/videos/generations", {"prompt": "x", "response_format": "xml"}, "response_format"),
    ("/v1/images/generations", {"prompt": "x", "n": 11}, "n: 11; 1 to 10"),
    ("/v1/images/generations", {"prompt": "x", "quality": "hd"}, "quality: has no meaning"),
]


@pytest.mark.parametrize("path, body, words", MALFORMED, ids=[str(number) for number in range(len(MALFORMED))])
def test_a_malformed_request_is_refused_with_its_reason(deployment, path, body, words):
    status, answer = call("POST", path, body)
    assert 400 <= status < 500 and words in answer["error"]["message"]


def test_a_job_as_a_form_is_the_same_job(deployment):
    form = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nhello\r\n'
    form += b'--b\r\nContent-Disposition: form-data; name="num_inference_steps"\r\n\r\n1\r\n--b--\r\n'
    status, job = call("POST", "/v1/videos", form, **{"content-type": "multipart/form-data; boundary=b"})
    assert status == 200 and job["prompt"] == "hello" and job["steps"] == 1


@pytest.mark.flaky(reruns=1)
def test_an_engine_killed_in_mid_generation_is_a_retryable_error_and_serves_again(deployment):
    before = settled_steps()
    running = Background(lambda: generate(num_inference_steps=100, num_frames=33))
    wait_for(lambda: num_steps() > before + 1, 60)
    kill(engine_of(deployment, "video_diffusion"))
    status, answer = running.wait()
    assert status == 503 and answer["error"]["code"] == "unavailable"
    assert generate(num_inference_steps=1, num_frames=5)[0] == 200  # it waited for the next engine process


def is_answering():
    try:
        return call("GET", "/v1/models")[0] == 200
    except OSError:
        return False


@pytest.mark.flaky(reruns=1)
def test_a_frontend_that_is_killed_keeps_its_jobs(deployment):
    _, done = call("POST", "/v1/videos", {"prompt": PROMPT, "num_inference_steps": 1})
    wait_for(lambda: job_status(done["id"]) == "completed", 60)
    running = start_long_job()
    killed = deployment.frontend_pid()
    kill(killed)
    wait_for(lambda: deployment.frontend_pid() not in (None, killed) and is_answering())
    assert job_status(done["id"]) == "completed"
    assert decode(request("GET", f"/v1/videos/{done['id']}/content")[1])[0].shape[0] == 17
    _, failed = call("GET", f"/v1/videos/{running}")
    assert failed["status"] == "failed" and "create the job again" in failed["error"]["message"]
