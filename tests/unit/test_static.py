"""Promises about the source that are read off it: nothing that executes data, a head without torch, true texts.

Reliability T-S1: a peer's or a client's bytes must never reach something that can run them.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("superfluid_core", "superfluid_noded", "superfluid_head")
BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BANNED_CALLS = {
    "eval", "exec", "compile", "yaml.load", "yaml.unsafe_load", "torch.load", "os.system", "os.popen",
    "numpy.load", "np.load", "subprocess.getoutput", "__import__",
}  # fmt: skip


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for name in PACKAGES:
        for path in sorted((ROOT / name).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


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


def breaches(module: ast.Module) -> list[str]:
    found: list[str] = []
    for node in ast.walk(module):
        found += [f"imports {name}" for name in sorted(imported(node) & BANNED_MODULES)]
        if isinstance(node, ast.Call):
            found += breaches_of_call(node)
    return found


def test_nothing_in_the_product_can_execute_data() -> None:
    found = [f"{path.relative_to(ROOT)}: {b}" for path, tree in parsed() for b in breaches(tree)]
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
    assert breaches(ast.parse(source))


def test_the_lint_lets_harmless_code_pass() -> None:
    assert not breaches(ast.parse("model.eval()\nre.compile('a')\nrun(['ls'], shell=False)"))


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
