from typing import Any

import pytest
from isobatch_kernels.plan import Arithmetic, OperatorPlan, Plan, operator_plan, proof_of

OPERATOR = OperatorPlan(
    operator="linear",
    shape="4x4",
    tree="blocks-of-64",
    admitted={"direct": (2, 3), "padded-2": (1,)},
    refused={"direct": "1 row: differs"},
    comparisons=9,
)
PLAN = Plan(
    model_digest="sha256:" + "0" * 64,
    settings="sha256:" + "2" * 64,
    arithmetic=Arithmetic(device="cpu x", isa="AVX512", threads=1),
    versions={"torch": "2.11.0"},
    sampler="s",
    dtype="bfloat16",
    operators=(OPERATOR,),
)


def test_the_choice_of_schedules_does_not_move_the_fingerprint() -> None:
    other = OPERATOR.model_copy(update={"admitted": {"direct": ()}, "refused": {}})

    assert PLAN.model_copy(update={"operators": (other,)}).fingerprint == PLAN.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "sha256:" + "1" * 64},
        {"settings": "sha256:" + "3" * 64},
        {"probe": "sha256:" + "4" * 64},
        {"arithmetic": Arithmetic(device="cpu x", isa="AVX512", threads=2)},
        {"versions": {"torch": "2.12.0"}},
        {"sampler": "t"},
        {"dtype": "float16"},
        {"operators": (OPERATOR.model_copy(update={"tree": "blocks-of-32"}),)},
        {"operators": ()},
    ],
    ids=[
        "model",
        "settings",
        "probe",
        "threads",
        "version",
        "sampler",
        "dtype",
        "tree",
        "operators",
    ],
)
def test_whatever_fixes_the_bits_moves_the_fingerprint(change: dict[str, Any]) -> None:
    assert PLAN.model_copy(update=change).fingerprint != PLAN.fingerprint


def test_a_plan_keeps_its_proofs() -> None:
    assert Plan.model_validate_json(PLAN.model_dump_json()) == PLAN
    assert operator_plan(proof_of(OPERATOR)) == OPERATOR
