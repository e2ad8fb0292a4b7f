"""A file of vllm_backend's own tests, as it is: the clients below it know where `vllm_opt` is served, and as what.

    python vllm_backend_ci.py FILE [NAME ...]       in the file's folder; writes outcomes.json, and ends with 0

The files name localhost:8001 and vllm_opt; TRITON_GRPC and MODEL say what is meant here.
"""

import importlib.util
import json
import os
import sys
import unittest
from pathlib import Path

import pytest
import tritonclient.grpc
import tritonclient.grpc.aio

ADDRESS, MODEL = os.environ["TRITON_GRPC"], os.environ["MODEL"]


class Client(tritonclient.grpc.InferenceServerClient):
    def __init__(self, url, **fields):
        super().__init__(ADDRESS, **fields)

    def is_model_ready(self, model_name, **fields):
        return super().is_model_ready(MODEL, **fields)

    def async_stream_infer(self, model_name, inputs, **fields):
        super().async_stream_infer(MODEL, inputs, **fields)


class AsyncClient(tritonclient.grpc.aio.InferenceServerClient):
    def __init__(self, url, **fields):
        super().__init__(ADDRESS, **fields)

    def stream_infer(self, inputs_iterator, **fields):
        async def requests():
            async for request in inputs_iterator:
                yield {**request, "model_name": MODEL}

        return super().stream_infer(requests(), **fields)


class Outcomes:
    """What pytest has run: as many, and these have failed, each with why."""

    def __init__(self):
        self.num_run, self.failed = 0, {}

    def pytest_runtest_logreport(self, report):
        self.num_run += report.when == "call"
        if report.failed:
            self.failed[report.nodeid.rpartition("::")[2]] = str(report.longrepr)


def run_pytest(file, names):
    outcomes = Outcomes()
    pytest.main([str(file), "-q", "-k", " or ".join(names)], plugins=[outcomes])
    return outcomes.num_run, outcomes.failed


def run_unittest(file, names):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loader = unittest.TestLoader()
    loader.testNamePatterns = [f"*.{name}" for name in names] or None
    result = unittest.TextTestRunner(verbosity=2).run(loader.loadTestsFromModule(module))
    return result.testsRun, {test.id().rpartition(".")[2]: why for test, why in result.failures + result.errors}


tritonclient.grpc.InferenceServerClient, tritonclient.grpc.aio.InferenceServerClient = Client, AsyncClient
file, names = Path(sys.argv[1]), sys.argv[2:]
ran, failed = run_unittest(file, names) if "unittest.main()" in file.read_text() else run_pytest(file, names)
Path("outcomes.json").write_text(json.dumps({"ran": ran, "failed": failed}))
