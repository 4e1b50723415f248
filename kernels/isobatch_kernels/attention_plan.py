"""Performs the certification of one attention shape on this card, on a cache it fills itself."""

from dataclasses import replace
from itertools import groupby

import torch

from isobatch_kernels.attention_proofs import attention_operators, fill_cache
from isobatch_kernels.attention_schedules import AttentionSchedule, schedules
from isobatch_kernels.attention_tree import AttentionShape, tree_of
from isobatch_kernels.certification import CertificationRefused, Proof, certify, join
from isobatch_kernels.plan import OperatorPlan, operator_plan

_LONGEST = 1536  # keys of the longest request: some chunks of any tree


def plan_attention(
    shape: AttentionShape, block_size: int, device: torch.device, seed: int
) -> OperatorPlan:
    """Prove, for each height of tile and way to fold, the schedule liked best that holds.

    Raises `CertificationRefused` if the reference is not independent of the batch, or no fold of
    the least tile holds: nothing could serve a decode then.
    """
    every = schedules(shape, tree_of(shape), block_size)
    return operator_plan(_prove(shape, block_size, every, device, seed))


def reprove_attention(
    plan: OperatorPlan, shape: AttentionShape, block_size: int, device: torch.device, seed: int
) -> None:
    """Prove again what `plan` admitted. Raises `CertificationRefused` if some of it fails."""
    kept = admitted_schedules(plan, shape, block_size)
    proof = _prove(shape, block_size, kept, device, seed)
    if proof.refused:
        name, reason = next(iter(proof.refused.items()))
        raise CertificationRefused(
            f"attention {plan.shape}: the kept plan admits {name}, which is not admitted any "
            f"more: {reason}"
        )


def admitted_schedules(
    plan: OperatorPlan, shape: AttentionShape, block_size: int
) -> tuple[AttentionSchedule, ...]:
    """The schedules that `plan` admitted, in order of preference."""
    every = schedules(shape, tree_of(shape), block_size)
    return tuple(s for s in every if plan.admitted.get(s.name))


def _prove(
    shape: AttentionShape,
    block_size: int,
    candidates: tuple[AttentionSchedule, ...],
    device: torch.device,
    seed: int,
) -> Proof:
    """One proof of `candidates`; of one height and fold the first that holds ends the search."""
    cache = fill_cache(shape, block_size, _LONGEST, device, seed)
    joined: Proof | None = None
    kinds = sorted(candidates, key=_kind)  # stable: preference stays
    for _, alike in groupby(kinds, key=_kind):
        operators = attention_operators(cache, tree_of(shape), tuple(alike), (), seed)
        rivals = tuple(schedule for o in operators for schedule in o.candidates)
        proof = certify(replace(operators[0], candidates=rivals))
        joined = proof if joined is None else join(joined, proof)
    if joined is None:
        raise CertificationRefused(f"attention {shape}: no schedule is left to prove")
    return joined


def _kind(schedule: AttentionSchedule) -> tuple[int, bool, bool]:
    return schedule.rows, schedule.split, schedule.ticket
