"""tritonclient: HTTP and gRPC, whole answers and streams, with asyncio and without."""

import asyncio
import json
import os
import queue

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http
import tritonclient.http.aio as http_aio

HTTP, GRPC = os.environ["TRITON_HTTP"], os.environ["TRITON_GRPC"]


def inputs(kind, **more):
    values = {"text_input": np.array([b"One day"], object), "max_tokens": np.array([6], np.int32), **more}
    made = []
    for name, value in values.items():
        types = {"O": "BYTES", "i": "INT32", "b": "BOOL"}
        one = kind.InferInput(name, list(value.shape), types[value.dtype.kind])
        one.set_data_from_numpy(value)
        made.append(one)
    return made


def whole():
    texts = set()
    for kind, address in ((http, HTTP), (grpc, GRPC)):
        with kind.InferenceServerClient(address) as client:
            assert client.is_server_ready() and client.is_model_ready("completion")
            texts.add(client.infer("completion", inputs(kind)).as_numpy("text_output")[0])
    assert len(texts) == 1 and texts.pop()


def streamed():
    answers = queue.Queue()
    with grpc.InferenceServerClient(GRPC) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(
            "generate", inputs(grpc, stream=np.array([True])), enable_empty_final_response=True, request_id="one"
        )
        ids = []
        while True:
            result = answers.get(timeout=60)
            assert not isinstance(result, Exception), result
            if (tokens := result.as_numpy("output_ids")) is not None:
                ids += tokens.tolist()
            if result.get_response().parameters["triton_final_response"].bool_param:
                return ids


async def with_asyncio():
    async with http_aio.InferenceServerClient(HTTP) as client:
        text = (await client.infer("completion", inputs(http_aio))).as_numpy("text_output")[0]
    async with grpc_aio.InferenceServerClient(GRPC) as client:
        assert (await client.infer("completion", inputs(grpc_aio))).as_numpy("text_output")[0] == text
        body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
        request = grpc_aio.InferInput("request", [1], "BYTES")
        request.set_data_from_numpy(np.array([json.dumps(body).encode()], object))

        async def requests():
            yield {"model_name": "chat", "inputs": [request]}

        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            answer = json.loads(result.as_numpy("response")[0])
            assert answer["choices"][0]["message"]["content"] == "42"
            break


whole()
assert len(streamed()) == 6
asyncio.run(with_asyncio())
print("ok")
