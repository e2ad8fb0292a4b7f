"""The official package's files and batches: upload, list, a batch to its end, its results, a wrong one, cancel."""

import json
import os
import time

import openai

MODEL = os.environ["MODEL"]
CHAT = "/v1/chat/completions"
client = openai.OpenAI(max_retries=0)


def line(name: str, **fields: object) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0, **fields}
    return json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"


def ended(content: bytes) -> openai.types.Batch:
    file = client.files.create(file=("sums.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


batch = ended(line("good") + line("bad", temperature=9))
assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1), batch
answer = json.loads(client.files.content(batch.output_file_id).text)
assert answer["response"]["body"]["choices"][0]["message"]["content"] == "42", answer
error = json.loads(client.files.content(batch.error_file_id).text)
assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400), error
assert batch.id == next(iter(client.batches.list(limit=1))).id
assert {batch.input_file_id, batch.output_file_id} <= {file.id for file in client.files.list()}

wrong = ended(line("a") + line("a"))
assert wrong.status == "failed" and wrong.errors.data[0].line == 2, wrong
long = client.files.create(
    file=("long.jsonl", b"".join(line(str(number), max_tokens=500) for number in range(100))), purpose="batch"
)
running = client.batches.create(input_file_id=long.id, endpoint=CHAT, completion_window="24h")
assert client.batches.cancel(running.id).status in ("cancelling", "cancelled")
assert client.files.delete(batch.output_file_id).deleted
try:
    client.files.content(batch.output_file_id)
    raise AssertionError("a deleted file is there")
except openai.NotFoundError:
    pass
print("ok")
