"""The steps of docker/Dockerfile.trtllm, run on images of today's layout: the packages are in a virtual environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bireme.config import CHECKOUT
from tests.docker.dockerfile_steps import Build, StepError, base_environment, steps_of
from tests.docker.made_environments import STAND_IN, add_distribution, make_environment, pins_of

DOCKERFILE = CHECKOUT / "docker" / "Dockerfile.trtllm"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": "/dev/null"}  # 0: no isolation


def make_image(folder, version="1.2.1", **pins):
    """Return a build on an image whose Python is a virtual environment that has tensorrt_llm, and 26.07's versions."""
    environment = folder / "opt" / "venv-tritonserver"
    site = make_environment(environment, sys._base_executable, pins=pins_of("26.07") | pins)
    if version:
        (site / "tensorrt_llm").symlink_to(STAND_IN)
        add_distribution(site, "tensorrt_llm", version)
    return Build(DOCKERFILE, folder, base_environment(environment) | OFFLINE)


def keep_compiled(target):
    """Compile in the checkout, where other tests find it: in the image it is then found beside the same sources.

    Python's own as well: the image's ENV has no Python write it, and each of the build's would compile all anew.
    """
    subprocess.run([sys.executable, "-m", "bireme.kv.compile"], cwd=CHECKOUT, check=True)
    for pattern in ("bireme/kv/**/__pycache__/*_kernels.*.nb[ci]", "bireme/**/*.pyc", "tools/__pycache__/*.pyc"):
        for file in CHECKOUT.glob(pattern):
            place = target / file.relative_to(CHECKOUT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, place)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    build = make_image(tmp_path_factory.mktemp("image"))
    keep_compiled(build.root / "opt" / "bireme")
    build.run()
    return build


def test_the_image_s_own_python_has_tensorrt_llm_and_bireme(built):
    find = "from importlib.util import find_spec; print(find_spec('tensorrt_llm').origin)"
    done = built.call(["python3", "-c", f"{find}; import bireme.config; print(bireme.config.CHECKOUT)"])
    found, checkout = done.stdout.split()
    assert (
        Path(found).is_relative_to(built.root / "opt/venv-tritonserver") and Path(checkout) == built.root / "opt/bireme"
    )


def test_what_the_image_had_is_as_it_was(built):
    (site,) = built.root.glob("opt/venv-tritonserver/lib/*/site-packages")
    assert (site / "numpy").is_symlink() and (site / "tensorrt_llm-1.2.1.dist-info").is_dir()


def test_a_container_s_command_is_found_and_starts(built):
    assert "--health-port" in built.call([*built.commands["ENTRYPOINT"], "--help"]).stdout


def test_an_image_without_tensorrt_llm_ends_the_build(tmp_path):
    with pytest.raises(StepError, match="has no tensorrt_llm; name the python that has it"):
        make_image(tmp_path, version="").run()


def test_a_release_that_is_not_driven_ends_the_build(tmp_path):
    with pytest.raises(StepError, match=r"tensorrt_llm 1\.1\.0 is not driven; 1\.2 is the oldest"):
        make_image(tmp_path, version="1.1.0").run()


@pytest.mark.parametrize(("package", "version"), [("msgspec", "0.10.0"), ("protobuf", "4.25.0")])
def test_a_package_that_would_have_to_be_replaced_ends_the_build(tmp_path, package, version):
    with pytest.raises(StepError, match=rf"(?s){package}.*(conflict|No matching|ResolutionImpossible)"):
        make_image(tmp_path, **{package: version}).run()


def test_a_word_that_names_no_kind_of_environment_is_refused():
    command = ["sh", str(CHECKOUT / "docker" / "into_environment.sh"), sys.executable, "stubs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "stubs: leave it out, or say engine" in done.stderr) == (2, True)


def test_an_environment_made_from_the_image_s_does_not_see_its_packages(tmp_path):
    """Why the image has no second environment: this is what one would do."""
    build = make_image(tmp_path)
    build.call(["python3", "-m", "venv", "--without-pip", "--system-site-packages", "/opt/second"])
    assert "ModuleNotFoundError" in build.call(["/opt/second/bin/python", "-c", "import tensorrt_llm"]).stderr


def test_every_file_that_a_dockerfile_copies_and_every_script_that_it_runs_exists():
    for dockerfile in (CHECKOUT / "docker").glob("Dockerfile*"):
        for instruction, text in steps_of(dockerfile):
            names = text.split()[:-1] if instruction == "COPY" else [w for w in text.split() if w.endswith(".sh")]
            assert all((CHECKOUT / name).exists() for name in names if not name.startswith("-")), (dockerfile, text)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts_are_clean_by_shellcheck():
    scripts = [str(path) for folder in ("docker", "tests/gpu", "tools") for path in (CHECKOUT / folder).glob("*.sh")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
