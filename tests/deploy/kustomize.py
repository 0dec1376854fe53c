"""Composes what a kustomization.yaml lists, as far as ours go: resources, namespace, labels, generated ConfigMaps, patches, image tags.

A stand-in for the real program, which few test machines have; where it is there, a test compares the two. Unlike it, this one puts no
hash behind the names of generated ConfigMaps. What it does not know it refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

KNOWN = {"apiVersion", "kind", "namespace", "labels", "resources", "configMapGenerator", "patches", "images"}  # fmt: skip
CLUSTER_WIDE = {"Namespace"}

Resource = dict[str, Any]


def composed(folder: Path) -> list[Resource]:
    """Give the resources of a folder, its bases' included."""
    told = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    assert set(told) <= KNOWN, set(told) - KNOWN
    found: list[Resource] = []
    for name in told["resources"]:
        path = folder / name
        found += composed(path) if path.is_dir() else documents(path)
    for each in told.get("configMapGenerator", []):
        _generate(found, folder, each)
    for each in told.get("patches", []):
        for patch in documents(folder / each["path"]):
            (target,) = [one for one in found if identity(one) == identity(patch)]
            target.update(merged(target, patch))
    for resource in found:
        if resource["kind"] not in CLUSTER_WIDE:
            resource["metadata"]["namespace"] = told["namespace"]
        for label in told.get("labels", []):
            resource["metadata"].setdefault("labels", {}).update(label["pairs"])
        _tag(resource, {each["name"]: each["newTag"] for each in told.get("images", [])})
    return found


def _tag(resource: Resource, tags: dict[str, str]) -> None:
    for container in containers(resource):
        name = container["image"].partition(":")[0]
        if name in tags:
            container["image"] = f"{name}:{tags[name]}"


def documents(path: Path) -> list[Resource]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def identity(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def containers(resource: Resource) -> list[dict[str, Any]]:
    pod = resource.get("spec", {}).get("template", {}).get("spec", {})
    found: list[dict[str, Any]] = pod.get("containers", [])
    return found


def _generate(found: list[Resource], folder: Path, told: dict[str, Any]) -> None:
    data = {name: (folder / name).read_text(encoding="utf-8") for name in told["files"]}
    there = [one for one in found if identity(one) == ("ConfigMap", told["name"])]
    assert len(there) == (told.get("behavior") == "replace")
    if there:
        there[0]["data"] = data
    else:
        metadata = {"name": told["name"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def merged(whole: Any, patch: Any) -> Any:
    """Merge as Kubernetes does: objects by member, null removes, lists of named things by name, other lists as a whole."""
    if isinstance(whole, dict) and isinstance(patch, dict):
        kept = {key: value for key, value in whole.items() if key not in patch}
        both = {
            key: merged(whole.get(key), value) for key, value in patch.items() if value is not None
        }
        return {**kept, **both}
    if isinstance(patch, list) and patch and all(isinstance(one, dict) and "name" in one for one in patch):  # fmt: skip
        changes = {one["name"]: one for one in patch}
        kept_list = [merged(one, changes.pop(one["name"], {})) for one in whole or []]
        return [*kept_list, *changes.values()]
    return patch
