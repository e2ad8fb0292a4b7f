"""A checkout of the tests' own, with models that need no engine, and a program that serves it.

The decode model generates one token, publishes the metrics that health is judged by, and obeys a file of
faults in its run folder. As a program it is serve.py on that checkout:

    python -m tests.launch.galley FOLDER HTTP_PORT GRPC_PORT METRICS_PORT HEALTH_PORT
"""

import sys
from pathlib import Path

CONFIG = 'backend: "python"\ninstance_group [{ kind: KIND_MODEL count: 1 }]\n'
INPUTS = (
    ("text_input", "TYPE_STRING"),
    ("input_ids", "TYPE_INT32"),
    ("max_tokens", "TYPE_INT32"),
    ("ignore_eos", "TYPE_BOOL"),
    ("cache_salt", "TYPE_STRING"),
)
MODEL = """
import os, pathlib, threading, time
import numpy as np
from bireme.discovery.pulse import own_pulse
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for name, kind in {inputs}:
            config.add_input({{"name": name, "data_type": kind, "dims": [-1], "optional": True}})
        for name in ("output_ids", "input_ids"):
            config.add_output({{"name": name, "data_type": "TYPE_INT32", "dims": [-1]}})
        config.set_model_transaction_policy({{"decoupled": {decoupled}}})
        return config

    def initialize(self, args):
        self.name = args["model_name"]
        self.family = pb_utils.MetricFamily(name="bireme_engine_up", description="up", kind=pb_utils.MetricFamily.GAUGE)
        self.up = self.family.Metric(labels={{"worker": self.name}})
        self.up.set(1)
        self.pulse = own_pulse()
        threading.Thread(target=self.beat, daemon=True).start()

    def fault(self):
        path = pathlib.Path(os.environ["BIREME_RUN_DIR"]) / f"fault-{{self.name}}"
        return path.read_text() if path.exists() else ""

    def beat(self):
        while self.fault() != "silence":
            self.pulse.beat()
            time.sleep(0.2)

    def execute(self, requests):
        fault = self.fault()
        if fault == "crash":
            (pathlib.Path(os.environ["BIREME_RUN_DIR"]) / f"fault-{{self.name}}").unlink()
            os.kill(os.getppid(), 9)
        self.up.set(0 if fault == "down" else 1)
        for request in requests:
            sender = request.get_response_sender()
            time.sleep(30 if fault == "hang" else 0)
            error = pb_utils.TritonError("UNAVAILABLE: told to fail") if fault == "fail" else None
            name = "input_ids" if self.name == "tokenizer" else "output_ids"
            tensors = [pb_utils.Tensor(name, np.zeros(40, np.int32))]
            sender.send(pb_utils.InferenceResponse(tensors, error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def build(folder: Path) -> Path:
    """Make the checkout; return it."""
    for repository, name in (
        ("model_repository", "decode"),
        ("model_repository", "tokenizer"),
        ("ensembles", "completion"),
    ):
        version = folder / repository / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL.format(inputs=INPUTS, decoupled=name == "decode"))
        (version.parent / "config.pbtxt").write_text(CONFIG)
    (folder / "recipe").mkdir()
    (folder / "recipe" / "config.json").write_text("{}")
    (folder / "recipe" / "recipe.yaml").write_text(
        f"model: {folder}/recipe\nworkers: {{decode: {{engine: mocker, replicas: 2}}}}\n"
    )
    return folder


def main(folder: Path, http: int, grpc: int, metrics: int, health: int) -> int:
    from bireme.launch import Ports
    from bireme.launch.canaries import CanarySettings
    from bireme.launch.console import Console
    from bireme.launch.deployment import Deployment, DeploymentSettings
    from bireme.recipe_files import load_recipe
    from tools import serve

    settings = DeploymentSettings(
        recipe=load_recipe(folder / "recipe"),
        ports=Ports(http, grpc, metrics),
        health_port=health,
        checkout=folder,
        drain_timeout_s=5,
        canaries=CanarySettings(interval_s=1.0, timeout_s=1.0),
    )
    console = Console()
    return serve.serve(Deployment(settings, console), console)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
