"""The Kubernetes manifests: valid by the schemas, and in agreement with the programs: flags, files, ports, probes, drains."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from superfluid_core.limits import LinkLimits
from superfluid_head.api.gate import OPEN_PATHS
from superfluid_head.config import HeadConfig
from superfluid_noded.config import NodeConfig
from superfluid_noded.web import build_app
from tests.deploy.kustomize import Resource, composed, containers, identity
from tests.deploy.programs import DEPLOY, accepted, secrets
from tests.deploy.test_containers import program_of

FOLDER = DEPLOY / "kubernetes"
VARIANTS = {"base": FOLDER / "base", "cpu": FOLDER / "overlays/cpu"}
SCHEMAS = {"base": "1.28", "cpu": "1.37"}
"""The oldest version that is meant, and the newest whose schema is known."""
KEYS_AT = "/run/secrets/superfluid"
STOP_MARGIN_MS = 15_000


@functools.cache
def variant(name: str) -> dict[tuple[str, str], Resource]:
    return {identity(resource): resource for resource in composed(VARIANTS[name])}


def workload(name: str, which: str) -> Resource:
    kind = "Deployment" if which == "head" else "StatefulSet"
    return variant(name)[kind, f"superfluid-{which}"]


def pod(name: str, which: str) -> dict[str, Any]:
    found: dict[str, Any] = workload(name, which)["spec"]["template"]["spec"]
    return found


def judged(name: str, which: str, folder: Path) -> HeadConfig | NodeConfig:
    """Let the program of a pod judge its arguments, with the files that are mounted there."""
    (container,) = containers(workload(name, which))
    volumes = {each["name"]: each for each in pod(name, which)["volumes"]}
    files: dict[str, Path] = {}
    for mount in container["volumeMounts"]:
        source = volumes.get(mount["name"], {})
        if "secret" in source:
            items = {item["path"] for item in source["secret"]["items"]}
            made = secrets(folder, mount["mountPath"])
            files |= {there: here for there, here in made.items() if Path(there).name in items}
        elif "configMap" in source:
            data = variant(name)["ConfigMap", source["configMap"]["name"]]["data"]
            for file, text in data.items():
                (folder / file).write_text(text, encoding="utf-8")
                files[f"{mount['mountPath']}/{file}"] = folder / file
    values = {each["name"]: "pod-0" for each in container.get("env", [])}
    words = [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], word) for word in container["args"]]
    repository = container["image"].partition(":")[0].removeprefix("superfluid-")
    return accepted(program_of(f"deploy/Dockerfile.{repository}"), words, files, folder)


@pytest.mark.parametrize(("name", "version"), SCHEMAS.items())
def test_every_resource_is_valid_by_its_schema(name: str, version: str) -> None:
    assert len(variant(name)) == 14
    for resource in variant(name).values():
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_misspelt_member_would_be_found() -> None:
    wrong = json.loads(json.dumps(workload("base", "node")))
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(wrong, SCHEMAS["cpu"], strict=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_kustomize_composes_the_same(name: str) -> None:
    program = shutil.which("kustomize") or shutil.which("kubectl")
    if program is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    verb = "build" if program.endswith("kustomize") else "kustomize"
    run = subprocess.run(
        [program, verb, str(VARIANTS[name])], capture_output=True, text=True, timeout=50, check=False
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    hashed = re.compile(r"(superfluid-(?:head|node))-[a-z0-9]{10}\b")
    real = {identity(each): each for each in yaml.safe_load_all(hashed.sub(r"\1", run.stdout))}
    assert real == variant(name)


@pytest.mark.parametrize("which", ["head", "node"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_pod_gives_its_program_what_it_takes_and_time_to_drain(
    name: str, which: str, tmp_path: Path
) -> None:
    config = judged(name, which, tmp_path)
    (container,) = containers(workload(name, which))
    drain_ms = config.limits.drain_ms if isinstance(config, HeadConfig) else config.drain_grace_ms
    pause = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])  # fmt: skip
    assert pause[0] == "sleep"
    grace_ms = pod(name, which)["terminationGracePeriodSeconds"] * 1000
    assert grace_ms >= drain_ms + int(pause[1]) * 1000 + STOP_MARGIN_MS
    ports = {each["containerPort"] for each in container["ports"]}
    if isinstance(config, HeadConfig):
        assert {port for _, port in config.http} == ports
        assert not config.keys.is_empty
        assert config.fleet_auth is not None
    else:
        assert config.metrics is not None
        assert {port for _, port in (*config.listen, config.metrics)} == ports
        assert config.metrics_token is not None
        assert config.identity == "pod-0"


@pytest.mark.parametrize("name", VARIANTS)
def test_heads_dial_every_node_by_the_name_that_the_headless_service_gives(
    name: str, tmp_path: Path
) -> None:
    config = judged(name, "head", tmp_path)
    assert isinstance(config, HeadConfig)
    node = workload(name, "node")["spec"]
    service = variant(name)["Service", node["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    expected = [
        (f"superfluid-node-{n}.{node['serviceName']}", 8454) for n in range(node["replicas"])
    ]
    assert [(each.host, each.port) for each in config.fleet] == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_probes_ask_routes_that_need_no_key_on_ports_that_are_there(name: str) -> None:
    probes = {
        which: {
            kind: containers(workload(name, which))[0][f"{kind}Probe"]
            for kind in ("startup", "liveness", "readiness")
        }
        for which in ("head", "node")
    }
    routes = {route.path for route in build_app(bytes, dict, lambda: (True, {}), b"x").routes}  # type: ignore[attr-defined]
    known = {"head": OPEN_PATHS, "node": routes}
    for which, kinds in probes.items():
        ports = {each["name"] for each in containers(workload(name, which))[0]["ports"]}
        for kind, probe in kinds.items():
            assert probe["httpGet"]["path"] in known[which]
            assert probe["httpGet"]["port"] in ports
            expected = "/readyz" if kind == "readiness" else "/livez"
            assert probe["httpGet"]["path"] == expected
    live = probes["node"]["liveness"]
    assert live["periodSeconds"] * live["failureThreshold"] * 1000 > 4 * LinkLimits().engine_hung_ms


@pytest.mark.parametrize("name", VARIANTS)
def test_selectors_meet_pods_and_policies_name_ports_that_exist(name: str) -> None:
    labels = {w: workload(name, w)["spec"]["template"]["metadata"]["labels"] for w in ("head", "node")}  # fmt: skip
    ports = {w: {p["name"] for p in containers(workload(name, w))[0]["ports"]} for w in labels}

    def met(selector: dict[str, str]) -> list[str]:
        return [which for which, own in labels.items() if selector.items() <= own.items()]

    for (kind, _), resource in variant(name).items():
        spec = resource.get("spec", {})
        if kind == "Service":
            (which,) = met(spec["selector"])
            assert {each["targetPort"] for each in spec["ports"]} <= ports[which]
        elif kind == "PodDisruptionBudget":
            assert len(met(spec["selector"]["matchLabels"])) == 1
        elif kind == "NetworkPolicy" and spec["podSelector"]:
            (which,) = met(spec["podSelector"]["matchLabels"])
            named = {p["port"] for rule in spec["ingress"] for p in rule["ports"]}
            assert named == ports[which]
    budgets = [key for key in variant(name) if key[0] == "PodDisruptionBudget"]
    assert len(budgets) == 2


def test_only_heads_reach_the_link_of_a_node() -> None:
    rules = variant("base")["NetworkPolicy", "superfluid-node"]["spec"]["ingress"]
    (link,) = [rule for rule in rules if rule["ports"][0]["port"] == "link"]
    head = {"app.kubernetes.io/name": "superfluid-head"}
    assert link["from"] == [{"podSelector": {"matchLabels": head}}]
    default = variant("base")["NetworkPolicy", "superfluid-default"]["spec"]
    assert default["podSelector"] == {}
    assert "ingress" not in default


@pytest.mark.parametrize("which", ["head", "node"])
def test_pods_meet_the_restricted_standard_that_their_namespace_enforces(which: str) -> None:
    namespace = variant("base")["Namespace", "superfluid"]["metadata"]["labels"]
    assert namespace["pod-security.kubernetes.io/enforce"] == "restricted"
    spec, (container,) = pod("base", which), containers(workload("base", which))
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    own = container["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert own["readOnlyRootFilesystem"] is True
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(spec)
    assert "env" not in container or all("valueFrom" in each for each in container["env"])


def test_a_pod_has_one_gpu_and_without_gpus_none_is_asked_for() -> None:
    (gpu,), (cpu,) = (containers(workload(name, "node")) for name in VARIANTS)
    for kind in ("requests", "limits"):
        assert gpu["resources"][kind]["nvidia.com/gpu"] == 1
    assert "nvidia" not in json.dumps(workload("cpu", "node"))
    assert cpu["image"] == "superfluid-node:0.1.0-cpu"
    told = tomllib.loads(variant("cpu")["ConfigMap", "superfluid-node"]["data"]["noded.toml"])
    base = tomllib.loads(variant("base")["ConfigMap", "superfluid-node"]["data"]["noded.toml"])
    assert {key: value for key, value in told.items() if base.get(key) != value} == {
        "model": "Qwen/Qwen3-0.6B", "device": "cpu",
    }  # fmt: skip
