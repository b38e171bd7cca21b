"""Pods, selectors and network policies of rendered manifests, as a cluster would read them."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from support.kustomize import Resource

UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class Pod(NamedTuple):
    """A kind of pod that a workload makes."""

    name: str
    """Name of the workload, and of the template if it has two."""
    workload: Resource
    template: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the pod."""
        return self.template["metadata"]["labels"]

    @property
    def component(self) -> str:
        """The part of the fleet that it belongs to."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def spec(self) -> dict[str, Any]:
        """Specification of the pod."""
        return self.template["spec"]

    @property
    def container(self) -> dict[str, Any]:
        """Its only container."""
        [container] = self.spec["containers"]
        return container

    @property
    def ports(self) -> dict[str, int]:
        """Ports of the container by name."""
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}


class Manifests:
    """The resources of one rendered kustomization."""

    def __init__(self, resources: list[Resource]) -> None:
        self.resources = resources

    def of(self, kind: str) -> list[Resource]:
        """Return all resources of a kind."""
        return [resource for resource in self.resources if resource["kind"] == kind]

    def get(self, kind: str, name: str) -> Resource:
        """Return the resource of this kind and name. Raises ``ValueError`` unless there is exactly one."""
        [found] = [resource for resource in self.of(kind) if resource["metadata"]["name"] == name]
        return found

    @cached_property
    def pods(self) -> list[Pod]:
        """Every kind of pod."""
        return list(self._pods())

    def _pods(self) -> Iterator[Pod]:
        for resource in self.resources:
            name, spec = resource["metadata"]["name"], resource.get("spec", {})
            if resource["kind"] in ("Deployment", "StatefulSet"):
                yield Pod(name, resource, spec["template"])
            elif resource["kind"] == "LeaderWorkerSet":
                for part in ("leaderTemplate", "workerTemplate"):
                    yield Pod(f"{name} {part}", resource, spec["leaderWorkerTemplate"][part])

    def pod(self, component: str) -> Pod:
        """Return the only kind of pod of a component."""
        [found] = [pod for pod in self.pods if pod.component == component]
        return found

    def selected(self, selector: dict[str, Any]) -> list[Pod]:
        """Return the kinds of pods that a label selector selects."""
        return [pod for pod in self.pods if selects(selector, pod.labels)]

    def reached(self, source: dict[str, str] | None, source_namespace: str, target: Pod) -> set[int | str]:
        """Return the TCP ports of ``target`` that a pod with labels ``source`` reaches; {"all"}: all of them.

        ``source``: None for a pod that no policy selects. A policy of the target's namespace may restrict both ends.
        """
        ingress = self._allowed("ingress", "from", target.labels, source or {}, source_namespace)
        if source is None or source_namespace != "pdserve":
            return ingress
        egress = self._allowed("egress", "to", source, target.labels, "pdserve")
        if "all" in ingress or "all" in egress:
            return egress if "all" in ingress else ingress
        return ingress & egress

    def _allowed(
        self, direction: str, peers: str, labels: dict[str, str], other: dict[str, str], namespace: str
    ) -> set[int | str]:
        policies = [p["spec"] for p in self.of("NetworkPolicy") if selects(p["spec"]["podSelector"], labels)]
        policies = [p for p in policies if direction.capitalize() in p["policyTypes"]]
        if not policies:
            return {"all"}
        ports: set[int | str] = set()
        for rule in (rule for policy in policies for rule in policy.get(direction, [])):
            if peers in rule and not any(_is_peer(peer, other, namespace) for peer in rule[peers]):
                continue
            if "ports" not in rule:
                ports.add("all")
            ports |= {port["port"] for port in rule.get("ports", []) if port["protocol"] == "TCP"}
        return ports


def _is_peer(peer: dict[str, Any], labels: dict[str, str], namespace: str) -> bool:
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace}):
            return False
    elif namespace != "pdserve":
        return False
    return "podSelector" not in peer or selects(peer["podSelector"], labels)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a label selector selects ``labels``. Raises ``KeyError`` for an operator other than In."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    named = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return named and all(labels.get(expression["key"]) in expression["values"] for expression in expressions)


def in_bytes(quantity: str) -> int:
    """Return a quantity such as 8Gi in bytes."""
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def command_of(pod: Pod, manifests: Manifests, folder: Path, **variables: str) -> list[str]:
    """Return the arguments of a pod's container, with its files in ``folder`` and its variables replaced.

    ``variables``: values of variables that the cluster knows. Raises ``KeyError`` for one that the pod does not have.
    """
    mounts = {mount["name"]: mount["mountPath"] for mount in pod.container["volumeMounts"]}
    moved: dict[str, str] = {}
    for volume in pod.spec["volumes"]:
        files: dict[str, bytes] = {}
        if source := volume.get("configMap"):
            config = manifests.get("ConfigMap", source["name"])["data"]
            files = {name: text.encode() for name, text in config.items()}
        elif source := volume.get("secret"):
            secret = manifests.get("Secret", source["secretName"])["data"]
            files = {name: base64.b64decode(text) for name, text in secret.items()}
        else:
            continue
        place = folder / volume["name"]
        place.mkdir(parents=True, exist_ok=True)
        moved[mounts[volume["name"]]] = str(place)
        for name, content in files.items():
            (place / name).write_bytes(content)
            (place / name).chmod(0o600)
    for file in (folder / "config").iterdir():
        file.write_text(_moved(file.read_text(encoding="utf-8"), moved), encoding="utf-8")
    known = variables | {entry["name"]: entry.get("value", "10.0.0.1") for entry in pod.container.get("env", [])}
    return [
        _moved(re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word), moved) for word in pod.container["args"]
    ]


def _moved(text: str, folders: dict[str, str]) -> str:
    for old, new in folders.items():
        text = text.replace(old, new)
    return text
