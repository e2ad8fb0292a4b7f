"""Files and batches on a real deployment, through the official client, with frontends that are killed."""

import json
import time

import openai
import pytest

from tests.server.openai_kills import engine_pid, kill_in_turn, oldest_member, server_of
from tests.server.openai_served import URL, Served, chat, five_ports, served, wait_for

pytestmark = pytest.mark.server


def client_of(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=8)


def sums(count):
    """Return an input of so many sums, and the answer to each."""
    asked = {f"sum-{number}": (10 + number % 40, 10 + number // 40) for number in range(count)}
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions",
         "body": chat(f"What is {one} + {other}?", temperature=0)}
        for name, (one, other) in asked.items()
    ]  # fmt: skip
    return "\n".join(map(json.dumps, rows)).encode(), {name: str(sum(pair)) for name, pair in asked.items()}


def begin(client, content):
    file = client.files.create(file=("sums.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "a test"}
    )


def lines_of(client, batch_id, limit_s=120):
    """Return the lines of the output once the batch has ended; every line of the input has exactly one."""
    wait_for(lambda: client.batches.retrieve(batch_id).status == "completed", limit_s)
    batch = client.batches.retrieve(batch_id)
    rows = [json.loads(row) for row in client.files.content(batch.output_file_id).text.splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows) == batch.request_counts.total
    return rows


def answers_of(client, batch_id, limit_s=120):
    """Return the text of each line's answer once the batch has ended."""
    rows = lines_of(client, batch_id, limit_s)
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}


def check_kills(deployment, count, victims, limit_s):
    """Run a batch in which one process after the other is killed; every line is answered once, and rightly."""
    client, (content, expected) = client_of(deployment.url), sums(count)
    batch = begin(client, content)

    def num_done():
        return client.batches.retrieve(batch.id).request_counts.completed

    kill_in_turn(deployment, victims, num_done, count, limit_s)
    told = answers_of(client, batch.id, limit_s)
    assert told.keys() == expected.keys()
    assert sum(told[name] == expected[name] for name in expected) >= 0.97 * count  # as good as the model is


def test_a_batch_of_sums_through_the_official_client(chat_deployment):
    client, (content, expected) = client_of(URL), sums(4)
    batch = begin(client, content)
    assert answers_of(client, batch.id) == expected
    assert batch.id in [one.id for one in client.batches.list()]
    file = client.files.retrieve(batch.input_file_id)
    assert (file.bytes, file.filename) == (len(content), "sums.jsonl")
    assert client.files.content(file.id).read() == content
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_frontend_that_is_killed_goes_on_with_its_batch(chat_deployment):
    check_kills(chat_deployment, 150, [Served.frontend_pid], 60)


@pytest.mark.soak
def test_a_thousand_lines_are_answered_once_each_whatever_is_killed(tmp_path):
    with served("recipes/tiny-chat", tmp_path / "log", "--frontend-processes=2", ports=five_ports()) as deployment:
        check_kills(deployment, 1000, [oldest_member, engine_pid, oldest_member, server_of], 300)


@pytest.mark.soak
def test_a_batch_of_10000_lines_leaves_live_streams_their_first_token(tmp_path):
    with served("recipes/tiny-chat", tmp_path / "log", ports=five_ports()) as deployment:
        client = client_of(deployment.url)

        def first_token_ms():
            times = []
            for number in range(40):
                began = time.perf_counter()
                stream = client.chat.completions.create(**chat(f"What is {number + 20} + 12?"), stream=True)
                next(iter(stream))
                times.append(1000 * (time.perf_counter() - began))
                stream.close()
            return sorted(times)[len(times) // 2]

        alone = first_token_ms()
        batch = begin(client, sums(10_000)[0])
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed > 10)
        beside = first_token_ms()
        client.batches.cancel(batch.id)
        print(f"time to first token, median of 40: {alone:.1f} ms alone, {beside:.1f} ms beside a batch")
        assert client.batches.retrieve(batch.id).status in ("cancelling", "cancelled")
