"""The dashboard's files: open to anybody, without data, and told to the browser with nothing but this head in reach."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from superfluid_head.access.keys import KeyRing, Principal
from superfluid_head.dashboard.pages import FILES, FOLDER, PATHS, POLICY
from tests.unit.head_api.conftest import Bench

ROOT = Path(__file__).resolve().parents[3]
UNSAFE = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function")


@pytest.fixture
def locked(make_bench: Any) -> Iterator[Bench]:
    return make_bench(keys=KeyRing([("admin-key", Principal("root", admin=True))]))  # type: ignore[no-any-return]


def texts(*suffixes: str) -> list[tuple[str, str]]:
    return [(p.name, p.read_text("utf-8")) for p in FOLDER.iterdir() if p.suffix in suffixes]


@pytest.mark.parametrize("path", sorted(PATHS))
def test_every_file_is_open_without_a_key_and_strict_with_the_browser(
    locked: Bench, path: str
) -> None:
    reply = locked.send("GET", path)
    assert reply.status_code == 200
    assert reply.headers["content-security-policy"] == POLICY
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["x-frame-options"] == "DENY"
    assert reply.headers["cache-control"] == "no-cache"
    assert len(reply.content) > 100
    head = locked.send("HEAD", path)
    assert (head.status_code, head.content) == (200, b"")


def test_the_policy_allows_nothing_but_this_head() -> None:
    rules = dict(each.split(" ", 1) for each in POLICY.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in POLICY


@pytest.mark.parametrize(
    "path",
    ["/dashboard/other.js", "/dashboard/..%2fpages.py", "/dashboard/pages.py", "/index.html"],
)
def test_nothing_else_below_these_paths_is_open(locked: Bench, path: str) -> None:
    assert locked.send("GET", path).status_code == 401
    reply = locked.send("GET", path, headers={"authorization": "Bearer admin-key"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")


def test_the_data_that_the_page_asks_for_needs_the_key(locked: Bench) -> None:
    asked = {path for _, text in texts(".js") for path in re.findall(r"[\"`](/v1/[a-z/]+)", text)}
    assert asked == {
        "/v1/fleet", "/v1/fleet/events", "/v1/fleet/nodes/", "/v1/fleet/requests/", "/v1/sessions/",
    }  # fmt: skip
    assert all(locked.send("GET", path).status_code == 401 for path in asked)


def test_a_browser_that_has_the_file_gets_no_second_copy(bench: Bench) -> None:
    first = bench.send("GET", "/dashboard/app.js")
    again = bench.send("GET", "/dashboard/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == POLICY
    stale = bench.send("GET", "/dashboard/app.js", headers={"if-none-match": '"other"'})
    assert stale.status_code == 200


def test_the_page_is_not_to_be_written_to(bench: Bench) -> None:
    reply = bench.send("POST", "/dashboard", json={})
    assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")


def test_no_code_or_style_is_inline_and_no_text_becomes_markup() -> None:
    ((_, page),) = texts(".html")
    assert not re.findall(r"\son[a-z]+=|\sstyle=|<style|javascript:", page)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))
    found = [f"{name}: {word}" for name, text in texts(".js") for word in UNSAFE if word in text]
    assert not found


def test_the_key_is_kept_in_the_tab_alone() -> None:
    kept = "".join(text for name, text in texts(".js") if name != "theme.js")
    assert "localStorage" not in kept
    assert "cookie" not in kept
    assert re.findall(r"sessionStorage\.(\w+)\(([^),]*)", kept) == [
        ("getItem", "KEY"), ("removeItem", "KEY"), ("setItem", "KEY"),
    ]  # fmt: skip


def test_everything_that_is_named_is_there_and_nothing_is_fetched_from_elsewhere() -> None:
    for name, text in texts(".html", ".js", ".css", ".svg"):
        elsewhere = set(re.findall(r"https?://[^\"')\s]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not elsewhere, name
        named = re.findall(r"/dashboard/([\w.-]+)", text) + re.findall(
            r"from \"\./([\w.]+)\"", text
        )
        assert set(named) <= set(FILES), name
    sources = {name for _, text in texts(".html", ".js") for name in FILES if name in text}
    assert sources == set(FILES) - {"index.html"}


def test_every_element_that_a_script_looks_for_is_in_the_page() -> None:
    ((_, page),) = texts(".html")
    there = set(re.findall(r"\sid=\"([\w-]+)\"", page))
    wanted = {
        name for _, text in texts(".js") for name in re.findall(r"byId\(\"([\w-]+)\"\)", text)
    }
    assert wanted <= there
    assert len(wanted) > 30


def test_the_files_are_part_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    data = project["tool"]["setuptools"]["package-data"]
    assert data["superfluid_head.dashboard"] == ["static/*"]
    assert {path.suffix for path in FOLDER.iterdir()} == {".html", ".css", ".js", ".svg"}
