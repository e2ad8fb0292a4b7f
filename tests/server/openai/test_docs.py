"""The curl examples of the documentation, run as they stand, and the chat model inside Triton."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.server.openai_served import PORTS, chat
from tests.server.triton_client import Stream

pytestmark = pytest.mark.server
DOCS = [Path("docs/openai.md"), Path("docs/messages.md"), Path("README.md")]
EXAMPLES = [block for path in DOCS for block in re.findall(r"```bash\n(curl .*?)```", path.read_text(), re.DOTALL)]
OURS = [block for block in EXAMPLES if ":9000/" in block]


@pytest.fixture
def deployment(chat_deployment):
    return chat_deployment


def test_the_documentation_has_examples():
    """Without any, the test below would be skipped."""
    assert [any(f"```bash\n{example}" in path.read_text() for example in OURS) for path in DOCS] == [True] * len(DOCS)


@pytest.mark.parametrize("example", OURS)
def test_an_example_works_as_it_stands(deployment, example):
    command = example.replace(":9000/", f":{PORTS['openai']}/")
    output = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
    assert '"error"' not in output
    if '"stream": true' in example:
        assert output.rstrip().endswith("data: [DONE]")
    else:
        assert json.loads(output).keys() & {"choices", "content"}


def test_the_readme_s_example_of_generate_works_as_it_stands(deployment):
    [command] = re.findall(
        r"^\$ (curl [^\n]*localhost:8000/.*?)\n\{", Path("README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    command = command.replace(":8000/", f":{PORTS['http']}/")
    output = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(output)["text_output"] == "42"


def test_the_chat_model_answers_a_request_as_the_frontend_does(deployment):
    responses = ask_triton(chat("What is 12 + 30?"))
    assert [body["choices"][0]["message"]["content"] for body in responses] == ["42"]


def test_the_chat_model_streams_chunks(deployment):
    chunks = ask_triton(chat("What is 12 + 30?", stream=True, stream_options={"include_usage": True}))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == "42"
    assert chunks[-1]["usage"]["completion_tokens"] == 2


def test_a_wrong_request_to_the_chat_model_names_the_field(deployment):
    with pytest.raises(Exception, match="INVALID_ARGUMENT: temperature"):
        ask_triton(chat("x", temperature=9))


def ask_triton(body):
    stream = Stream(f"127.0.0.1:{PORTS['grpc']}", "chat", {"request": json.dumps(body)})
    return [json.loads(response["response"]) for response in stream if response]
