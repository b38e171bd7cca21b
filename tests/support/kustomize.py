"""Renders kustomizations as ``kubectl kustomize`` does, as far as docker/kubernetes/ uses them.

Names of generated ConfigMaps and Secrets get no hash. A field that is not known here is an error, so that none is
silently left out.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

KNOWN = {"apiVersion", "kind", "namespace", "labels", "resources", "components", "images", "patches"}
KNOWN |= {"configMapGenerator", "secretGenerator", "configurations"}
HASHED = re.compile(r"^(pdserve-(?:config|instances|router))-[0-9a-z]{10}$")
"""Name of a generated object, with the hash that kustomize appends."""
NO_NAMESPACE = {"Namespace"}


def render(folder: Path) -> list[Resource]:
    """Return the resources of the kustomization in ``folder``. Raises ``ValueError`` for what it does not know."""
    return _apply(folder, [])


def _apply(folder: Path, before: list[Resource]) -> list[Resource]:
    """Return ``before`` as the kustomization in ``folder`` changes it. A component changes what it is included in."""
    wanted = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    if unknown := wanted.keys() - KNOWN:
        raise ValueError(f"{folder}: {unknown}")
    resources = deepcopy(before)
    for name in wanted.get("resources", []):
        resources += render(folder / name) if (folder / name).is_dir() else _documents(folder / name)
    for name in wanted.get("components", []):
        resources = _apply(folder / name, resources)
    for kind in ("ConfigMap", "Secret"):
        for generator in wanted.get(f"{kind[0].lower()}{kind[1:]}Generator", []):
            _generate(kind, generator, folder, resources)
    for patch in wanted.get("patches", []):
        text = patch.get("patch") or (folder / patch["path"]).read_text(encoding="utf-8")
        for resource in _targets(patch["target"], resources):
            for operation in yaml.safe_load(text):
                _patch(resource, operation)
    for resource in resources:
        _transform(resource, wanted)
    return resources


def _documents(file: Path) -> list[Resource]:
    return [document for document in yaml.safe_load_all(file.read_text(encoding="utf-8")) if document]


def _generate(kind: str, generator: dict[str, Any], folder: Path, resources: list[Resource]) -> None:
    options = generator.get("options", {})
    if unknown := generator.keys() - {"name", "behavior", "files", "options"}:
        raise ValueError(f"{folder}: {unknown}")
    if unknown := options.keys() - {"disableNameSuffixHash", "labels"}:
        raise ValueError(f"{folder}: {unknown}")
    data = {}
    for entry in generator["files"]:
        key, _, path = entry.rpartition("=")
        content = (folder / path).read_bytes()
        data[key or Path(path).name] = base64.b64encode(content).decode() if kind == "Secret" else content.decode()
    name = generator["name"]
    if generator.get("behavior") == "merge":
        [existing] = [r for r in resources if (r["kind"], r["metadata"]["name"]) == (kind, name)]
        existing["data"] |= data
        return
    made: Resource = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "data": data}
    if kind == "Secret":
        made["type"] = "Opaque"
    if labels := options.get("labels"):
        made["metadata"]["labels"] = dict(labels)
    resources.append(made)


def _targets(target: dict[str, str], resources: list[Resource]) -> Iterator[Resource]:
    if unknown := target.keys() - {"kind", "name"}:
        raise ValueError(f"patch target {unknown}")
    found = [
        resource
        for resource in resources
        if resource["kind"] == target["kind"] and re.fullmatch(target.get("name", ".*"), resource["metadata"]["name"])
    ]
    if not found:
        raise ValueError(f"no resource is {target}")
    yield from found


def _patch(resource: Resource, operation: dict[str, Any]) -> None:
    """Apply one operation of a JSON patch (RFC 6902). Raises ``ValueError`` if a test fails or it is not known."""
    *way, last = operation["path"].removeprefix("/").split("/")
    place: Any = resource
    for step in way:
        place = place[int(step) if isinstance(place, list) else step]
    key: Any = int(last) if isinstance(place, list) and last != "-" else last
    match operation["op"]:
        case "add" if isinstance(place, list):
            place.insert(len(place) if last == "-" else key, deepcopy(operation["value"]))
        case "add":
            place[key] = deepcopy(operation["value"])
        case "replace":
            assert place[key] is not None
            place[key] = deepcopy(operation["value"])
        case "remove":
            del place[key]
        case "test" if place[key] == operation["value"]:
            pass
        case _:
            raise ValueError(f"{resource['metadata']['name']}: {operation}")


def _transform(resource: Resource, wanted: dict[str, Any]) -> None:
    metadata = resource["metadata"]
    for labels in wanted.get("labels", []):
        if labels.keys() != {"pairs"}:
            raise ValueError(f"labels {labels.keys()}")
        metadata.setdefault("labels", {}).update(labels["pairs"])
    if "namespace" in wanted and resource["kind"] not in NO_NAMESPACE:
        metadata["namespace"] = wanted["namespace"]
    for image in wanted.get("images", []):
        for container in _containers(resource):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"


def _containers(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the containers at any depth of ``value``."""
    if isinstance(value, dict):
        yield from value.get("containers", [])
        for inner in value.values():
            yield from _containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _containers(inner)


def without_hashes(value: Any) -> Any:
    """Return ``value`` with the names of generated objects as ``render`` writes them."""
    if isinstance(value, dict):
        return {key: without_hashes(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_hashes(inner) for inner in value]
    return HASHED.sub(r"\1", value) if isinstance(value, str) else value
