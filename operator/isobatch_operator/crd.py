"""Decides the CustomResourceDefinition: the contracts' models as a structural schema.

`python -m isobatch_operator.crd` prints it; the chart's `files/crd.yaml` is that text.
"""

from collections.abc import Mapping
from typing import Any

import yaml
from isobatch_contracts.base import RULES, cel
from isobatch_contracts.resource import InferenceServiceSpec
from isobatch_contracts.service_status import ServiceStatus

GROUP = "serving.isobatch.dev"
VERSION = "v1alpha1"
PLURAL = "inferenceservices"
NAME = f"{PLURAL}.{GROUP}"
_HEADER = "# Generated from the models by `python -m isobatch_operator.crd`: change those.\n"
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_KEPT = frozenset(
    ("type", "enum", "pattern", "format", "description", "default", "required", "minimum", *_SIZES)
) | {"maximum"}
_COLUMNS = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Servable", "string", '.status.conditions[?(@.type=="Servable")].status', 0),
    ("Strict", "string", '.status.pools[?(@.name=="strict")].ready', 0),
    ("Throughput", "string", '.status.pools[?(@.name=="throughput")].ready', 0),
    ("Phase", "string", ".status.rollout.phase", 0),
    ("Weight", "integer", ".status.rollout.weight", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Model", "string", ".spec.model.uri", 1),
    ("Stable", "string", ".status.rollout.stableRevision", 1),
    ("Canary", "string", ".status.rollout.canaryRevision", 1),
    ("Reason", "string", ".status.rollout.reason", 1),
)


def definition() -> dict[str, Any]:
    """The whole definition."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema()},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority}
            for name, kind, path, priority in _COLUMNS
        ],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.pools.throughput.replicas",
                "statusReplicasPath": ".status.throughput.replicas",
                "labelSelectorPath": ".status.throughput.selector",
            },
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": "InferenceService",
                "listKind": "InferenceServiceList",
                "plural": PLURAL,
                "singular": "inferenceservice",
                "shortNames": ["ibs"],
                "categories": ["isobatch"],
            },
            "versions": [version],
        },
    }


def schema() -> dict[str, Any]:
    """The structural schema of one InferenceService."""
    return {
        "type": "object",
        "description": "One model, served by a strict and a throughput pool behind one gateway.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(InferenceServiceSpec.model_json_schema()),
            "status": structural(ServiceStatus.model_json_schema()),
        },
        **cel(
            "self.metadata.name.size() <= 40 && !self.metadata.name.contains('.')",
            "metadata.name must be a DNS label of 40 characters at most: others are made of it",
        ),
    }


def structural(document: Mapping[str, Any]) -> dict[str, Any]:
    """A model's JSON schema as Kubernetes takes one: no references, unions, titles, or nulls."""
    return _place(document, document.get("$defs", {}))


def _place(place: Mapping[str, Any], models: Mapping[str, Any]) -> dict[str, Any]:
    place = _resolved(place, models)
    kept = {k: v for k, v in place.items() if k in _KEPT or k.startswith("x-kubernetes-")}
    if "const" in place:
        kept["enum"] = [place["const"]]
    if "enum" in kept:
        kept.setdefault("type", "string")
    if kept.get("x-kubernetes-int-or-string"):
        del kept["type"]
    if "items" in place:
        kept["items"] = _place(place["items"], models)
    more = place.get("additionalProperties")
    keys = _resolved(place.get("propertyNames", {}), models).get("enum")
    if isinstance(more, Mapping) and keys is not None:
        kept["properties"] = {key: _place(more, models) for key in keys}
        kept.pop("maxProperties", None)
    elif isinstance(more, Mapping):
        kept["additionalProperties"] = _place(more, models)
    if "properties" in place:
        kept["properties"] = {k: _place(v, models) for k, v in place["properties"].items()}
    return _with_default(kept)


def _with_default(kept: dict[str, Any]) -> dict[str, Any]:
    """`kept` with the default that a stored resource should show, if it should show any."""
    default = kept.pop("default", None)
    if isinstance(default, dict):
        # Written out: a rule is checked against a default before the defaults inside it hold.
        inner = kept.get("properties", {})
        whole = {name: place["default"] for name, place in inner.items() if "default" in place}
        if whole:
            kept["default"] = whole
    elif default is not None and default != []:
        kept["default"] = default
    return kept


def _resolved(place: Mapping[str, Any], models: Mapping[str, Any]) -> Mapping[str, Any]:
    """`place` with what it refers to, and without the null that an absent field is."""
    if "anyOf" in place:
        (one,) = (choice for choice in place["anyOf"] if choice.get("type") != "null")
        rest = {k: v for k, v in place.items() if k != "anyOf"}
        return _resolved({**_resolved(one, models), **rest}, models)
    if "$ref" in place:
        model = models[place["$ref"].removeprefix("#/$defs/")]
        rest = {k: v for k, v in place.items() if k != "$ref"}
        return _resolved({**model, **rest}, models)
    return place


def missing(installed: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of ours that the installed definition lacks, and so would silently drop."""
    for version in installed.get("spec", {}).get("versions", ()):
        if version.get("name") == VERSION:
            found = version.get("schema", {}).get("openAPIV3Schema", {})
            return tuple(_missing(schema(), found, ""))
    return (f"version {VERSION}",)


def _missing(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> list[str]:
    absent = []
    for name, place in ours.get("properties", {}).items():
        there = theirs.get("properties", {}).get(name)
        if there is None:
            absent.append(f"{path}.{name}".removeprefix("."))
        else:
            absent += _missing(place, there, f"{path}.{name}")
    if "items" in ours:
        absent += _missing(ours["items"], theirs.get("items", {}), f"{path}[]")
    return absent


def rules(place: Mapping[str, Any]) -> int:
    """How many rules over several fields `place` and what is in it have."""
    inner = [*place.get("properties", {}).values()]
    inner += [place[key] for key in ("items", "additionalProperties") if key in place]
    return len(place.get(RULES, ())) + sum(rules(one) for one in inner)


def text() -> str:
    """The definition as YAML, stable."""
    return _HEADER + yaml.safe_dump(definition(), sort_keys=False, width=100)


if __name__ == "__main__":
    print(text(), end="")  # noqa: T201  # the output of the command
