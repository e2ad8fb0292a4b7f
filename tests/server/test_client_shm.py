"""Shared memory: no other user reads the server's; a client's own is refused unless the launch allows it."""

import contextlib
import uuid

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from bireme.discovery.pulse import SHM

pytestmark = pytest.mark.server

MODELS = ("tokenizer", "decode", "completion")
PROMPT = serialize_byte_tensor(np.array([b"two banks of oars"], object)).item()
CLIENTS = {"http": httpclient, "grpc": grpcclient}


@pytest.fixture(scope="module")
def closed(sample_model, start):
    sample_model("llama")
    return start("recipes/mocker", models=MODELS)


@pytest.fixture(scope="module")
def opened(sample_model, start):
    sample_model("llama")
    return start("recipes/mocker", models=MODELS, allow_client_shm=True)


def test_no_other_user_of_the_host_can_read_what_goes_through_a_server_s_memory(closed):
    paths = list(SHM.glob(f"{closed.run_folder.shm_prefix}*"))
    assert len(paths) >= len(MODELS)
    assert [path.name for path in paths if path.stat().st_mode & 0o077] == []


@contextlib.contextmanager
def region(size):
    name = f"bireme-test-{uuid.uuid4().hex[:8]}"
    handle = shm.create_shared_memory_region(name, f"/{name}", size)
    try:
        yield name, handle
    finally:
        shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("protocol", CLIENTS)
def test_without_the_option_the_refusal_names_it(closed, protocol):
    client = CLIENTS[protocol].InferenceServerClient(getattr(closed, protocol))
    with region(64) as (name, _), pytest.raises(InferenceServerException, match="allow-client-shm"):
        client.register_system_shared_memory(name, f"/{name}", 64)
    client.close()


@pytest.mark.parametrize("protocol", CLIENTS)
def test_with_the_option_tensors_are_read_and_written_in_place(opened, protocol):
    module = CLIENTS[protocol]
    client = module.InferenceServerClient(getattr(opened, protocol))
    num_tokens = 6
    with region(len(PROMPT)) as (given, in_handle), region(4 * num_tokens) as (made, out_handle):
        shm.set_shared_memory_region(in_handle, [np.frombuffer(PROMPT, np.uint8)])
        client.register_system_shared_memory(given, f"/{given}", len(PROMPT))
        client.register_system_shared_memory(made, f"/{made}", 4 * num_tokens)
        text, count = module.InferInput("text_input", [1], "BYTES"), module.InferInput("max_tokens", [1], "INT32")
        text.set_shared_memory(given, len(PROMPT))
        count.set_data_from_numpy(np.array([num_tokens], np.int32))
        ids = module.InferRequestedOutput("output_ids")
        ids.set_shared_memory(made, 4 * num_tokens)
        client.infer("completion", [text, count], outputs=[ids])
        found = shm.get_contents_as_numpy(out_handle, np.int32, [num_tokens]).tolist()
        client.unregister_system_shared_memory()
    text = module.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"two banks of oars"], object))
    assert found == client.infer("completion", [text, count]).as_numpy("output_ids").tolist()
    client.close()
