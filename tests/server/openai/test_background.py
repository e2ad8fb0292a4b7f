"""Background responses of a real deployment whose processes are killed."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.server.openai_kills import engine_pid, kill_in_turn, oldest_member, server_of
from tests.server.openai_served import Served, five_ports, served, wait_for

pytestmark = pytest.mark.server
ENDED = ("completed", "incomplete", "failed", "cancelled")


def check_kills(deployment, count, num_tokens, victims, limit_s):
    """Have processes killed while responses run; each ends once, with the answer that a live request gets."""
    client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=8)
    requests = [
        {"model": "tiny-chat", "input": f"Say plam {number} times.", "extra_body": {"ignore_eos": True},
         "max_output_tokens": num_tokens * (number + 1) // count}
        for number in range(count)
    ]  # fmt: skip
    ids = [client.responses.create(**request, background=True).id for request in requests]
    ended = {}  # id -> the response as it was first seen to have ended

    def num_done():
        for one in ids[len(ended) :]:  # short ones come first, and looking at all takes as long as they do
            if (response := client.responses.retrieve(one)).status not in ENDED:
                break
            ended[one] = response
        return len(ended)

    kill_in_turn(deployment, victims, num_done, count, limit_s)
    wait_for(lambda: num_done() == count, limit_s)
    with ThreadPoolExecutor(16) as asked:
        answers = list(asked.map(lambda request: client.responses.create(**request, store=False), requests))
    for one, live in zip(ids, answers, strict=True):
        assert (ended[one].status, ended[one].output_text) == ("incomplete", live.output_text)
        assert client.responses.retrieve(one) == ended[one]  # nobody has answered it again


def test_a_frontend_that_is_killed_goes_on_with_its_background_responses(chat_deployment):
    check_kills(chat_deployment, 12, 900, [Served.frontend_pid], 60)


@pytest.mark.soak
def test_200_background_responses_are_answered_once_each_whatever_is_killed(tmp_path):
    with served("recipes/tiny-chat", tmp_path / "log", "--frontend-processes=2", ports=five_ports()) as deployment:
        check_kills(deployment, 200, 800, [oldest_member, engine_pid, oldest_member, server_of], 300)
        assert "response_taken_over" in (tmp_path / "log").read_text()
