"""bireme's requirements against the packages of NVIDIA's images with TensorRT-LLM, as pins/ has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bireme.config import CHECKOUT
from bireme.engines.trtllm import contract
from tests.docker.dockerfile_steps import Build, base_environment
from tests.docker.made_environments import IMAGES, PINS, make_image_environment, pins_of
from tests.docker.make_pins import PLATFORM
from tests.pythons import python_of

SCRIPT = (CHECKOUT / "docker" / "into_environment.sh").read_text()
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


def requirements(image):
    """Return what into_environment.sh has pip install into an image, where torch's CUDA is 13 as in all of these."""
    kind = "engine" if IMAGES[image][1].endswith("-release") else "all"
    extras = [*re.search(rf"^{kind}\) extras=([\w,]+)", SCRIPT, re.M)[1].split(","), "nixl-cu13"]
    more = re.findall(r'"(av\b[^"]*)"', SCRIPT)
    return [
        *PROJECT["dependencies"],
        *(one for name in extras for one in PROJECT["optional-dependencies"][name]),
        *more,
    ]


def test_the_releases_of_the_contract_have_their_images():
    assert {version for version, _ in IMAGES.values()} == set(contract.VERSIONS.values())


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_s_own_packages_are_what_bireme_asks_for(image):
    pins = pins_of(image)
    wanted = [Requirement(text) for text in requirements(image)]
    found = {one: pins[name] for one in wanted if (name := canonicalize_name(one.name)) in pins}
    assert {str(one): version for one, version in found.items() if version not in one.specifier} == {}


@pytest.mark.parametrize("image", IMAGES)
def test_packages_that_an_image_lacks_fit_those_that_it_has(image):
    """As they would be chosen there today. What they require is read, and none is fetched."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", f"--constraints={PINS / image}.txt", *PLATFORM]
    variables = os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
    if "PIP_INDEX_URL" in os.environ:
        variables["UV_DEFAULT_INDEX"] = os.environ["PIP_INDEX_URL"]
    asked = "\n".join(requirements(image))
    done = subprocess.run(command, input=asked, env=variables, capture_output=True, text=True, check=False)
    if done.returncode and "error sending request" in done.stderr:
        pytest.skip(f"no package index can be reached: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_made_of_what_nvidia_s_holds_and_replaces_nothing(image, tmp_path):
    version, dockerfile = IMAGES[image]
    python = python_of("3.12")  # all four images' own
    if python is None:
        pytest.skip("no Python 3.12 here; install it (apt-get install python3.12-venv)")
    environment = tmp_path / "opt" / "venv-tritonserver"
    make_image_environment(environment, python, image, version)
    engine = str(environment / "bin" / "python")
    build = Build(CHECKOUT / "docker" / dockerfile, tmp_path, base_environment(environment), ENGINE_PYTHON=engine)
    build.run()
    listed = build.call([engine, "-m", "pip", "list", "--format=freeze"]).stdout.splitlines()
    found = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in listed)}
    assert {name: found.get(name) for name in pins_of(image)} == pins_of(image) and "tritonclient" not in found
    assert build.call([engine, "-c", "import bireme.workers.grpc, bireme.workers.kserve"]).returncode == 0
    assert "--health-port" in build.call([*build.commands["ENTRYPOINT"], "--help"]).stdout
