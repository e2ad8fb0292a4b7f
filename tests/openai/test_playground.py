"""The playground's files as the frontend serves them."""

import re
from pathlib import Path

import pytest

from bireme.openai import playground_files
from bireme.openai.playground_files import FOLDER, PlaygroundFiles, packaged_files
from tests.openai.test_keys import keys

ESCAPES = [
    "/playground/../app.py",
    "/playground/js/../../app.py",
    "/playground//etc/passwd",
    "/playground/%2e%2e/app.py",
    "/playground/index.html/",
    "/playground/",
    "/playground/js",
    "/index.html",
    "/playground/js/app.js\0",
]


async def test_the_page_is_at_the_root_and_its_parts_below_playground(frontend):
    bench = await frontend()
    reply = await bench.call("GET", "/").end()
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path in re.findall(r'(?:src|href)="(playground/[^"]+)"', reply.data.decode()):
        assert (await bench.call("GET", f"/{path}").end()).status == 200


async def test_every_module_that_is_imported_is_served_as_javascript(frontend):
    bench = await frontend()
    scripts = [path for path in sorted(packaged_files().paths) if path.endswith(".js")]
    assert len(scripts) > 10
    for path in scripts:
        reply = await bench.call("GET", path).end()
        assert reply.headers["content-type"] == "text/javascript; charset=utf-8"
        imported = re.findall(r'from "\./([^"]+)"', reply.data.decode())
        assert {f"/playground/js/{name}" for name in imported} <= set(scripts)


async def test_the_page_asks_for_all_modules_at_once(frontend):
    """Modules that only their importers name would come one round trip after another."""
    page = (await (await frontend()).call("GET", "/").end()).data.decode()
    early = set(re.findall(r'(?:modulepreload" href|src)="(playground/js/[^"]+)"', page))
    assert {path.name for path in (FOLDER / "js").glob("*.js")} == {Path(path).name for path in early}


async def test_without_a_key_the_page_is_open_and_nothing_else_of_it_is(frontend):
    bench = await frontend(keys())
    for path in packaged_files().paths:
        assert (await bench.call("GET", path).end()).status == 200
    for path in ESCAPES:
        assert (await bench.call("GET", path).end()).status == 401


@pytest.mark.parametrize("path", ESCAPES)
async def test_no_path_leads_out_of_the_folder(frontend, path):
    reply = await (await frontend()).call("GET", path).end()
    assert reply.status == 404 and reply.json()["error"]["code"] == "not_found"


async def test_the_page_may_load_from_and_talk_to_this_server_only(frontend):
    reply = await (await frontend()).call("GET", "/").end()
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
    assert policy.pop("media-src") == "blob:"  # videos that the page has made of an answer
    assert policy.pop("img-src") == "'self' data:"  # pictures that the user attached
    assert {value for name, value in policy.items() if name.endswith("-src")} == {"'none'", "'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert reply.headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_the_browser_has_is_not_sent_again(frontend):
    bench = await frontend()
    etag = (await bench.call("GET", "/").end()).headers["etag"]
    for tags in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        reply = await bench.call("GET", "/", headers={"if-none-match": tags}).end()
        assert (reply.status, reply.data) == (304, b"") and "content-length" not in reply.headers
        assert reply.headers["etag"] == etag
    assert (await bench.call("GET", "/", headers={"if-none-match": '"other"'}).end()).status == 200


async def test_a_changed_file_has_another_tag(tmp_path):
    (tmp_path / "index.html").write_text("one")
    first = PlaygroundFiles(tmp_path)._files["/"].etag
    (tmp_path / "index.html").write_text("two")
    assert PlaygroundFiles(tmp_path)._files["/"].etag != first


async def test_other_files_in_the_folder_are_not_served(tmp_path):
    for name in ("index.html", "notes.txt", "secret.py"):
        (tmp_path / name).write_text("x")
    assert PlaygroundFiles(tmp_path).paths == {"/"}


async def test_the_pages_files_are_one_line_of_the_metrics(frontend):
    bench = await frontend()
    for path in ("/", "/playground/js/app.js", "/playground/css/base.css"):
        await bench.call("GET", path).end()
    page = (await bench.call("GET", "/metrics").end()).data.decode()
    assert 'bireme_http_requests_total{path="/",status="200",worker="frontend"} 3.0' in page
    assert "playground" not in page


async def test_the_page_takes_get_and_head(frontend):
    bench = await frontend()
    head = await bench.call("HEAD", "/").end()
    assert head.status == 200 and head.data == b"" and int(head.headers["content-length"]) > 1000
    post = await bench.call("POST", "/", {}).end()
    assert post.status == 405 and post.headers["allow"] == "GET"


async def test_a_recipe_can_switch_the_page_off(frontend):
    bench = await frontend(frontend={"playground": False})
    assert (await bench.call("GET", "/").end()).status == 404
    assert (await (await frontend(keys(), frontend={"playground": False})).call("GET", "/").end()).status == 401


def test_the_page_names_no_address_outside():
    for path in sorted(FOLDER.rglob("*.*")):
        addresses = set(re.findall(r"https?://[^\s\"'`)\\/]+", path.read_text()))
        assert addresses <= {"http://www.w3.org"}, path  # the name of SVG


def test_modules_say_what_they_are_and_have_lines_that_fit():
    for path in FOLDER.rglob("*.js"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("// ") and lines[0][3].isupper(), path
        assert max(map(len, lines)) <= 120 and len(lines) <= 300, path


def test_no_script_makes_markup_or_code_of_text():
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser|srcdoc"
    assert [path.name for path in FOLDER.rglob("*.js") if re.search(forbidden, path.read_text())] == []


def test_the_package_takes_the_files_along():
    """setuptools leaves out what pyproject.toml does not name."""
    patterns = re.search(r'"bireme\.openai" = \[([^\]]+)\]', Path("pyproject.toml").read_text())
    named = {found for pattern in re.findall(r'"([^"]+)"', patterns[1]) for found in FOLDER.parent.glob(pattern)}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} == named
    assert playground_files.FOLDER.is_dir()
