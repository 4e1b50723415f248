"""Resources that are refused, by our own validator and by an API server that has our definition."""

from dataclasses import dataclass
from typing import Any

import yaml

MINIMAL = """
    apiVersion: serving.isobatch.dev/v1alpha1
    kind: InferenceService
    metadata: {name: chat}
    spec:
      model: {uri: "builtin://smollm2-135m"}
      pools: {throughput: {}}
"""


def manifest(text: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.load(text, yaml.BaseLoader)
    return document


def changed(path: str, value: Any) -> dict[str, Any]:
    """The minimal manifest with `value` at the dotted `path`."""
    document = manifest(MINIMAL)
    *parents, last = path.split(".")
    place = document
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    return document


@dataclass(frozen=True, slots=True)
class Malformed:
    """`value` at `path` is refused; our message has `said` in it, the API server's `field`."""

    id: str
    path: str
    value: Any
    said: str
    field: str


GATE = {"name": "own", "max": "1"}
SCALED = {"min": 1, "max": 2, "targetRunningPerReplica": 8}
STEPS = "spec.rollout.steps"
GATES = "spec.rollout.gates"
FAST = "spec.pools.throughput"
RUNTIME = f"{FAST}.runtime"
MIGRATION = "spec.migration.standardToStrict.steps"

_ROWS: tuple[tuple[str, str, Any, str, str], ...] = (
    ("unknown-field", "spec.modle", {}, "modle", "modle"),
    ("unknown-nested-field", f"{RUNTIME}.arguments", [], "arguments", "arguments"),
    ("other-api-version", "apiVersion", "serving.isobatch.dev/v2", "apiVersion", "version"),
    ("other-kind", "kind", "Service", "kind", "kind"),
    ("no-spec", "spec", None, "spec", "spec"),
    ("no-model", "spec.model", None, "spec.model", "spec.model"),
    ("model-without-uri", "spec.model", {}, "uri", "spec.model.uri"),
    ("name-in-capitals", "metadata.name", "Chat", "metadata.name", "metadata.name"),
    ("name-too-long", "metadata.name", "a" * 41, "metadata.name", "metadata.name"),
    ("name-with-a-dot", "metadata.name", "a.b", "metadata.name", "metadata.name"),
    ("name-with-a-path", "metadata.name", "../etc", "metadata.name", "metadata.name"),
    ("uri-scheme", "spec.model.uri", "s3://bucket/x", "spec.model.uri", "spec.model.uri"),
    ("uri-too-long", "spec.model.uri", "hf://" + "a" * 2048, "model.uri", "spec.model.uri"),
    ("short-digest", "spec.model.digest", "sha256:abc", "model.digest", "spec.model.digest"),
    ("empty-model-name", "spec.model.name", "", "spec.model.name", "spec.model.name"),
    ("model-name-of-a-tier", "spec.model.name", "chat:strict", ":strict", "spec.model.name"),
    ("model-name-in-lines", "spec.model.name", "a\nb", "spec.model.name", "spec.model.name"),
    ("no-pool", "spec.pools", {}, "nobody would answer", "spec.pools"),
    ("unknown-pool", "spec.pools.fast", {}, "fast", "fast"),
    ("negative-replicas", f"{FAST}.replicas", -1, "replicas", f"{FAST}.replicas"),
    ("replicas-in-words", f"{FAST}.replicas", "two", "replicas", f"{FAST}.replicas"),
    ("too-many-replicas", f"{FAST}.replicas", 10**9, "replicas", f"{FAST}.replicas"),
    ("two-ways-to-scale", FAST, {"replicas": 1, "autoscaling": SCALED}, "not both", FAST),
    (
        "autoscaling-bounds",
        f"{FAST}.autoscaling",
        SCALED | {"min": 3},
        "above",
        f"{FAST}.autoscaling",
    ),
    (
        "scale-to-zero-at-once",
        f"{FAST}.autoscaling",
        SCALED | {"scaleToZeroAfter": "0s"},
        "longer than zero",
        "scaleToZeroAfter",
    ),
    ("huge-args", f"{RUNTIME}.args", ["--x"] * 257, "args", f"{RUNTIME}.args"),
    ("huge-argument", f"{RUNTIME}.args", ["x" * 5000], "args", f"{RUNTIME}.args[0]"),
    (
        "variable-with-an-equals-sign",
        f"{RUNTIME}.env",
        [{"name": "A=B", "value": "1"}],
        "env.0.name",
        f"{RUNTIME}.env[0].name",
    ),
    ("image-with-a-space", f"{RUNTIME}.image", "a b", "image", f"{RUNTIME}.image"),
    ("secret-name", f"{RUNTIME}.secrets", ["Top Secret"], "secrets", f"{RUNTIME}.secrets[0]"),
    ("no-length-at-all", f"{RUNTIME}.maxModelLen", 0, "maxModelLen", "maxModelLen"),
    (
        "amount",
        f"{FAST}.hardware.resources.limits",
        {"cpu": "many"},
        "limits.cpu",
        "resources.limits",
    ),
    ("negative-gpus", f"{FAST}.hardware.gpus", -1, "gpus", f"{FAST}.hardware.gpus"),
    (
        "toleration",
        f"{FAST}.hardware.tolerations",
        [{"operator": "Maybe"}],
        "operator",
        "operator",
    ),
    ("unknown-tier", "spec.tiers.default", "exact", "tiers.default", "spec.tiers.default"),
    ("tier-without-pool", "spec.tiers.default", "strict", "pools.strict is absent", "strict"),
    ("no-tier-allowed", "spec.tiers.allowed", [], "tiers.allowed", "spec.tiers.allowed"),
    ("default-not-allowed", "spec.tiers.allowed", ["strict"], "does not hold", "spec.tiers"),
    ("tier-twice", "spec.tiers.allowed", ["standard"] * 2, "twice", "spec.tiers.allowed[1]"),
    ("limits-of-unknown-tier", "spec.tiers.limits", {"exact": {}}, "limits", "exact"),
    ("fallback", "spec.tiers.standardFallback", "Maybe", "standardFallback", "Fallback"),
    ("rate-above-one", "spec.drift.sampleRate", "1.5", "share of 0 to 1", "sampleRate"),
    ("rate-as-a-float", "spec.drift.sampleRate", 0.01, "sampleRate", "sampleRate"),
    ("duration-in-words", "spec.rollout.deadline", "2 hours", "deadline", "rollout.deadline"),
    ("duration-too-long", "spec.rollout.deadline", "9" * 40 + "d", "deadline", "deadline"),
    ("no-time-at-all", "spec.rollout.deadline", "0h0s", "longer than zero", "deadline"),
    ("sentinels-without-pause", "spec.sentinels.every", "0s", "longer than zero", "every"),
    ("unknown-strategy", "spec.rollout.strategy", "Rolling", "strategy", "rollout.strategy"),
    ("never-promote", "spec.rollout.onInconclusive", "Promote", "onInconclusive", "Promote"),
    ("flat-steps", STEPS, [{"weight": 25}, {"weight": 25}], "must rise", "rollout.steps"),
    ("falling-steps", STEPS, [{"weight": 50}, {"weight": 5}], "must rise", "rollout.steps"),
    ("weight-above-100", STEPS, [{"weight": 101}], "weight", f"{STEPS}[0].weight"),
    ("many-steps", STEPS, [{"weight": n} for n in range(101)], "steps", STEPS),
    ("gate-without-source", GATES, [GATE], "metric and prometheus", f"{GATES}[0]"),
    (
        "gate-with-two-sources",
        GATES,
        [GATE | {"metric": "errorRate", "prometheus": {"query": "up"}}],
        "metric and prometheus",
        f"{GATES}[0]",
    ),
    (
        "gate-without-bound",
        GATES,
        [{"name": "own", "metric": "errorRate"}],
        "max and maxRatioToStable",
        f"{GATES}[0]",
    ),
    (
        "gate-on-what-nobody-measures",
        GATES,
        [GATE | {"metric": "happiness"}],
        "metric",
        f"{GATES}[0].metric",
    ),
    (
        "falling-migration",
        MIGRATION,
        [{"weight": 50}, {"weight": 10}],
        "migration.standardToStrict.steps must rise",
        "migration.standardToStrict",
    ),
)
MALFORMED = tuple(Malformed(*row) for row in _ROWS)
