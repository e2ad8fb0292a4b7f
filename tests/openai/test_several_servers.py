"""A frontend whose workers are on several servers, or on none of its own."""

import pytest

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.discovery.records import WorkerRecord
from bireme.errors import ConfigError, UnavailableError
from bireme.metrics import Registry
from bireme.openai import __main__ as program
from bireme.openai.readiness import Readiness
from bireme.openai.text.served_model import Models, ServedModel
from bireme.workers.fake import FakeWorkers
from tests.pipelines.conftest import letters

ETCD = {"backend": "etcd", "current": False, "reason": "etcd at http://h:1: gone (for 60 s)", "refused": {}}


CURRENT = ETCD | {"current": True, "reason": ""}


class Told:
    """A Discovery that is told what to say."""

    is_current = False

    def __init__(self, view, told=ETCD):
        self.view, self.told = view, told

    def watch(self, on_change):
        on_change(self.view)

    def stop(self): ...

    def report(self):
        return self.told


def recipe(**more):
    tree = {"model": "none", "workers": {"decode": {"engine": "mocker"}}, "name": "test"}
    return convert(tree | more, Recipe, "test")


@pytest.fixture
def served():
    """Return a function: worker id -> state, and what discovery says => a started model and its workers."""

    def make(told=ETCD, settings=None, **states):
        view = {f"{name}@b:1": WorkerRecord(worker=name, state=state) for name, state in states.items()}
        workers = FakeWorkers()
        model = ServedModel(recipe(**settings or {}), workers, letters(), Registry("frontend"), Told(view, told))
        model.start()
        return model, workers

    return make


async def test_readiness_asks_the_workers_that_there_are(served):
    model, workers = served(decode="ready", decode_1="ready", decode_2="draining")
    workers.down["decode@b:1"] = UnavailableError("its engine starts")
    is_ready, report = await Readiness(Models([model])).report()
    assert is_ready
    assert report["models"]["test"] == {
        "decode@b:1": "its engine starts",
        "decode_1@b:1": "ready",
        "decode_2@b:1": "draining",
    }


@pytest.mark.usefixtures("short_waits")
async def test_the_page_of_metrics_says_whether_the_frontend_can_answer(frontend):
    bench = await frontend()

    async def level():
        page = (await bench.call("GET", "/metrics").end()).data.decode()
        return [line for line in page.splitlines() if line.startswith("bireme_frontend_ready{")]

    assert await level() == ['bireme_frontend_ready{worker="frontend"} 1.0']
    bench.workers.down["decode"] = UnavailableError("its engine starts")
    assert await level() == ['bireme_frontend_ready{worker="frontend"} 0.0']


async def test_a_discovery_that_is_gone_is_said_and_takes_nothing_down(served):
    model, _ = served(decode="ready")
    is_ready, report = await Readiness(Models([model])).report()
    assert is_ready and report["status"] == "degraded" and report["discovery"] == {"test": ETCD}


async def test_a_worker_that_is_down_while_another_serves_makes_it_degraded(served):
    model, workers = served(CURRENT, decode="ready", decode_1="ready")
    assert (await Readiness(Models([model])).report())[1]["status"] == "ready"
    workers.down["decode@b:1"] = UnavailableError("its engine starts")
    is_ready, report = await Readiness(Models([model])).report()
    assert is_ready and report["status"] == "degraded"


async def test_a_worker_that_drains_is_no_fault(served):
    model, _ = served(CURRENT, decode="ready", decode_1="draining")
    assert (await Readiness(Models([model])).report())[1]["status"] == "ready"


SPLIT = {"workers": {"prefill": {"engine": "mocker"}, "decode": {"engine": "mocker"}}}


@pytest.mark.parametrize(("enforces", "status"), [(False, "degraded"), (True, "not_ready")])
async def test_without_prefill_it_is_not_ready_where_nothing_else_may_compute_prompts(served, enforces, status):
    settings = SPLIT | {"pipeline": {"enforce_disaggregation": enforces}}
    model, workers = served(CURRENT, settings, prefill="ready", decode="ready")
    workers.down["prefill@b:1"] = UnavailableError("its engine starts")
    is_ready, report = await Readiness(Models([model])).report()
    assert report["status"] == status and is_ready != enforces


async def test_without_any_worker_it_is_not_ready(served):
    model, _ = served()
    is_ready, report = await Readiness(Models([model])).report()
    assert not is_ready and report["models"] == {"test": {}}


def test_a_recipe_with_a_shared_discovery_needs_no_server():
    shared = recipe(discovery={"backend": "directory", "folder": "/nowhere"})
    assert program._addresses(None, [shared]) == [None]
    assert program._addresses(["h:1"], [shared]) == ["h:1"]
    assert program._addresses(None, [recipe()]) == ["127.0.0.1:8001"]


def test_as_many_servers_as_recipes_are_asked_for():
    with pytest.raises(ConfigError, match="2 --recipe, 1 --grpc"):
        program._addresses(["h:1"], [recipe(), recipe()])


def test_videos_are_made_on_one_server():
    video = recipe(
        workers={"video_diffusion": {"engine": "mocker"}}, discovery={"backend": "directory", "folder": "/nowhere"}
    )
    with pytest.raises(ConfigError, match="videos are made on one server; give its --grpc"):
        program._addresses(None, [video])
