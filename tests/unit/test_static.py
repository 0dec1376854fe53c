"""Promises about the source that are read off it: nothing that executes data, a head without torch, true texts.

Reliability T-S1: a peer's or a client's bytes must never reach something that can run them.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("superfluid_core", "superfluid_noded", "superfluid_head")
BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BANNED_CALLS = {
    "eval", "exec", "compile", "yaml.load", "yaml.unsafe_load", "torch.load", "os.system", "os.popen",
    "numpy.load", "np.load", "subprocess.getoutput", "__import__",
}  # fmt: skip


Looked = ast.Call | ast.Compare | ast.Import | ast.ImportFrom


def looked_at(text: str) -> list[Looked]:
    """Parse a source: of its nodes those that a promise can be read off."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, Looked)]


@functools.cache
def parsed() -> tuple[tuple[Path, list[Looked]], ...]:
    paths = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    return tuple((path, looked_at(path.read_text(encoding="utf-8"))) for path in paths)


def dotted(node: ast.expr) -> str:
    """`a.b.c` as it is written; empty for anything that is not a plain dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module.split(".")[0]}
    return set()


def breaches_of_call(node: ast.Call) -> Iterator[str]:
    if dotted(node.func) in BANNED_CALLS:
        yield f"calls {dotted(node.func)}"
    for keyword in node.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else True
        if keyword.arg in ("shell", "trust_remote_code") and value is not False:
            yield f"passes {keyword.arg}"


def breaches(nodes: Iterable[Looked]) -> list[str]:
    found: list[str] = []
    for node in nodes:
        found += [f"imports {name}" for name in sorted(imported(node) & BANNED_MODULES)]
        if isinstance(node, ast.Call):
            found += breaches_of_call(node)
    return found


def test_nothing_in_the_product_can_execute_data() -> None:
    found = [f"{path.relative_to(ROOT)}: {b}" for path, nodes in parsed() for b in breaches(nodes)]
    assert not found, found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from marshal import loads", "eval('1')", "torch.load(path)", "yaml.load(text)",
        "subprocess.run('ls', shell=True)", "subprocess.run('ls', shell=flag)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)", "import dill.source",
    ],
)  # fmt: skip
def test_the_lint_finds_what_it_looks_for(source: str) -> None:
    assert breaches(looked_at(source))


def test_the_lint_lets_harmless_code_pass() -> None:
    assert not breaches(looked_at("model.eval()\nre.compile('a')\nrun(['ls'], shell=False)"))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["superfluid_head.cli", "superfluid_head.app"])
def test_the_head_imports_no_torch(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
        cwd=ROOT,
    )
    loaded = {name.split(".")[0] for name in json.loads(run.stdout)}
    assert not loaded & {"torch", "transformers", "safetensors", "numpy", "xllamacpp", "openai"}


# --- what is not there at all (reliability T-S 3 and 4, and the advisories) --------------------------


def calls(name: str) -> list[str]:
    """Where a function or method of that name is called."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, nodes in parsed()
        for node in nodes
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == name
    ]


def importers(*modules: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path, nodes in parsed()
        for node in nodes
        if imported(node) & set(modules)
    }


SECRET_NAMES = re.compile(r"(^|_)(secret|digest|token|api_key|password|bearer|credential)s?$")
TOKEN_NAMES = re.compile(r"(^|_)tokens?$")
SECRET_TOKENS = ("superfluid_head/access/", "superfluid_core/link/", "superfluid_noded/web.py")
"""Where a token would be a secret. Elsewhere it is a piece of text."""
NOT_GUESSED = {
    "superfluid_head/access/policy.py": "keys of one file among each other, when it is read: nobody guesses",
    "superfluid_head/api/idempotency.py": "the digest of a body, of two requests under one key of one principal",
    "superfluid_head/fleet/asks.py": "the digest of a file's contents, which its node has just told",
    "superfluid_head/text/grammar_check.py": "the digest of a grammar's text, as the key of a table of verdicts",
}


def compared_secrets(nodes: Iterable[Looked]) -> list[tuple[int, str]]:
    """Lines, and names, where something named like a secret of bytes or text is compared with == or `in`."""
    found = []
    for node in nodes:
        if not isinstance(node, ast.Compare):
            continue
        kinds = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
        names = [dotted(one).split(".")[-1] for one in (node.left, *node.comparators)]
        is_number = any(isinstance(one, ast.Constant) for one in (node.left, *node.comparators))
        if isinstance(node.ops[0], kinds) and not is_number:
            found += [(node.lineno, name) for name in names if SECRET_NAMES.search(name)]
    return found


def test_secrets_are_compared_in_constant_time() -> None:
    places = {"superfluid_head/access/keys.py", "superfluid_noded/web.py"}
    found = {line.rpartition(":")[0] for line in calls("compare_digest")}
    assert places <= found
    wrong = {
        name: [
            n for n, word in lines if not TOKEN_NAMES.search(word) or name.startswith(SECRET_TOKENS)
        ]
        for name, lines in ((str(p.relative_to(ROOT)), compared_secrets(n)) for p, n in parsed())
    }
    assert {name for name, lines in wrong.items() if lines} == set(NOT_GUESSED)


@pytest.mark.parametrize(
    "line", ["given == digest", "self.api_key != key", "secret in known", "x.bearer_token == y"]
)
def test_a_plain_comparison_of_a_secret_would_be_found(line: str) -> None:
    assert compared_secrets(looked_at(line))


def test_no_route_loads_pulls_uploads_or_tells_the_environment() -> None:
    from superfluid_head.app import routes

    words = (
        "pull",
        "push",
        "upload",
        "files",
        "env",
        "config",
        "weights",
        "lora",
        "load",
        "debug",
        "eval",
        "exec",
    )
    paths = [path for _, path, _ in routes(Mock())]
    assert len(paths) > 15
    assert [path for path in paths if any(word in path.split("/") for word in words)] == []
    assert calls("UploadFile") == calls("form") == []


def test_only_a_few_modules_can_reach_out() -> None:
    """HTTP clients belong to commands, benches and the hub; nothing that serves has one."""
    clients = importers("httpx", "requests", "urllib3", "aiohttp", "http", "huggingface_hub")
    serving = (
        "superfluid_head/api/",
        "superfluid_head/fleet/",
        "superfluid_head/text/",
        "superfluid_head/access/",
    )
    assert [path for path in clients if path.startswith(serving)] == []
    assert {p for p in clients if p.startswith("superfluid_core/")} <= {
        "superfluid_core/modelfiles/hub.py",
        "superfluid_core/tracing/otlp.py",  # imported only where --otlp-endpoint names a collector
    }
    nodes = {p for p in clients if p.startswith("superfluid_noded/")}
    assert nodes <= {"superfluid_noded/bench_engine.py"}


def test_no_files_and_no_forms_are_served() -> None:
    assert calls("FileResponse") == calls("StaticFiles") == calls("parse_form_data") == []
    assert not importers("multipart", "python_multipart")


def test_frames_are_never_unpacked_by_an_object_that_lives_on() -> None:
    assert calls("Unpacker") == []
    assert calls("unpackb")


def test_grammars_are_never_kept_on_disk() -> None:
    folder = ROOT / "superfluid_core" / "grammar"
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))]
    assert sources
    writers = re.compile(r"\bopen\(|write_text|write_bytes|tempfile|pathlib|shelve|sqlite")
    assert not [text for text in sources if writers.search(text)]


def test_no_connection_is_upgraded_to_tls_in_mid_stream() -> None:
    assert calls("start_tls") == []


NESTED = re.compile(r"\((?:[^()\\]|\\.)*[+*](?:[^()\\]|\\.)*\)(?:[+*]|\{\d*,)")


def patterns() -> Iterator[tuple[str, str]]:
    """Every constant regular expression of the product."""
    for path, nodes in parsed():
        for node in nodes:
            if not isinstance(node, ast.Call) or not node.args:
                continue
            first = node.args[0]
            is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
            if dotted(node.func).startswith("re.") and is_text:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", first.value  # type: ignore[attr-defined]


def test_no_expression_of_ours_can_repeat_a_repetition() -> None:
    found = list(patterns())
    assert len(found) > 20
    assert [(where, text) for where, text in found if NESTED.search(text)] == []
    assert NESTED.search("(a+)+")
    assert NESTED.search("(x*y)*")
    assert not NESTED.search("(ab)+")


def test_dependencies_are_at_least_as_new_as_their_last_hole() -> None:
    floors = {"msgpack": (1, 2, 4), "starlette": (0, 49, 1), "h11": (0, 16), "jinja2": (3, 1, 6)}
    for name, floor in floors.items():
        numbers = tuple(int(part) for part in re.findall(r"\d+", pins()[name])[:3])
        assert numbers >= floor, name


# --- what the texts say is there -------------------------------------------------------------------

README = ROOT / "README.md"
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
PATH_LIKE = re.compile(
    r"^[\w.@-]+(/[\w.@-]+)*(/|\.(py|md|toml|txt|yaml|yml|service|target|conf|env))$"
)
TREE_LINE = re.compile(r"^(?P<indent> *)(?P<name>[\w.@-]+/?)  +\S")


def mentioned_paths(text: str) -> set[str]:
    spans = {s for s in CODE_SPAN.findall(text) if PATH_LIKE.match(s)}
    links = {s for s in LINK.findall(text) if "://" not in s}
    return spans | links


def tree_paths(text: str) -> list[str]:
    """Paths of the annotated tree: the fenced block that begins with `superfluid_core/`."""
    block = text.partition("```text\nsuperfluid_core/")[2].partition("```")[0]
    folders: list[tuple[int, str]] = []
    found: list[str] = []
    for line in ("superfluid_core/" + block).splitlines():
        match = TREE_LINE.match(line)
        if match is None:
            continue
        indent = len(match["indent"])
        while folders and folders[-1][0] >= indent:
            folders.pop()
        path = "".join(name for _, name in folders) + match["name"]
        found.append(path)
        if match["name"].endswith("/"):
            folders.append((indent, match["name"]))
    return found


def test_every_path_in_the_readme_exists() -> None:
    text = README.read_text(encoding="utf-8")
    paths = sorted(mentioned_paths(text)) + tree_paths(text)
    assert len(paths) > 20
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, missing


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_every_link_in_the_other_texts_exists(name: str) -> None:
    links = {s for s in LINK.findall((ROOT / name).read_text(encoding="utf-8")) if "://" not in s}
    missing = sorted(link for link in links if not (ROOT / link).exists())
    assert not missing, missing


def test_every_make_target_that_a_text_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    texts = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", ".ci/run")]
    named = {
        name
        for path in texts
        for name in re.findall(
            r"(?:`|step |^)make ([a-z]+)", path.read_text(encoding="utf-8"), re.M
        )
    }
    assert {"demo", "test"} <= named
    assert not named - targets


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    split = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in split}


def test_every_dependency_has_an_exact_pin() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["node"],
        *project["dependency-groups"]["dev"],
        *project["dependency-groups"]["reference"],
        *project["build-system"]["requires"],
    ]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[\[><=~! ]", w)[0]).lower() for w in wanted}
    assert not names - set(pins())
    assert "+" not in pins()["torch"]


def test_every_dependency_says_what_it_saves() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    check: Callable[[str], bool] = lambda name: f"`{name}`" in text  # noqa: E731
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = [
        *project["project"]["dependencies"],
        *(name for extra in extras.values() for name in extra),
        *project["dependency-groups"]["dev"],
        *project["dependency-groups"]["reference"],
    ]
    names = {re.split(r"[\[><=~! ]", w)[0] for w in wanted}
    assert not sorted(name for name in names if not check(name))
