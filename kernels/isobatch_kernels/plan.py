"""Decides what a plan holds, which of it fixes the bits, and so what the numerics fingerprint is.

Two replicas of one fingerprint must give one output. The fingerprint covers what fixes the bits
(model, trees and constants, arithmetic, sampler, versions), not which schedules were admitted: any
admitted schedule has the tree's bits.
"""

import hashlib
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict

from isobatch_kernels.certification import Proof

PLAN_SCHEMA: Literal["isobatch.plan/v1"] = "isobatch.plan/v1"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OperatorPlan(_Frozen):
    """One operator shape: its tree, and where each schedule was proved.

    `admitted` maps schedule names to the domains (row counts) proved, ascending. `exact` and
    `spans` are the choice among the admitted, by row count and by bucket of row counts, where there
    is more than an order of preference: a matter of time, so no part of the fingerprint.
    """

    operator: str
    shape: str
    tree: str
    admitted: dict[str, tuple[int, ...]]
    refused: dict[str, str]
    comparisons: int
    exact: dict[int, str] = {}
    spans: dict[int, str] = {}


class Arithmetic(_Frozen):
    """What computes: device class, and for a CPU the rule of its threads."""

    device: str
    isa: str
    threads: int


class Plan(_Frozen):
    """The outcome of certification on one device for one model."""

    schema_id: Literal["isobatch.plan/v1"] = PLAN_SCHEMA
    model_digest: str
    settings: str  # digest of vLLM's arguments that can reach an answer
    arithmetic: Arithmetic
    versions: dict[str, str]
    sampler: str
    dtype: str
    operators: tuple[OperatorPlan, ...]
    probe: str = ""  # digest of the whole model's logits on fixed prompts, by the references

    @property
    def fingerprint(self) -> str:
        """`sha256:…` of the parts that fix the bits."""
        fixed = {
            "model": self.model_digest,
            "settings": self.settings,
            "arithmetic": self.arithmetic.model_dump(),
            "versions": self.versions,
            "sampler": self.sampler,
            "dtype": self.dtype,
            "probe": self.probe,
            "trees": sorted((o.operator, o.shape, o.tree) for o in self.operators),
        }
        canonical = json.dumps(fixed, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def operator_plan(proof: Proof) -> OperatorPlan:
    """`proof` as it is written in a plan."""
    return OperatorPlan(
        operator=proof.operator,
        shape=proof.shape,
        tree=proof.tree,
        admitted={name: tuple(sorted(at)) for name, at in proof.admitted.items()},
        refused=proof.refused,
        comparisons=proof.comparisons,
    )


def proof_of(plan: OperatorPlan) -> Proof:
    """The proof that `plan` records."""
    return Proof(
        operator=plan.operator,
        shape=plan.shape,
        tree=plan.tree,
        admitted={name: frozenset(at) for name, at in plan.admitted.items()},
        refused=plan.refused,
        comparisons=plan.comparisons,
    )
