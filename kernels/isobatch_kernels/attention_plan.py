"""Performs the certification of one attention shape on this card, on a cache it fills itself."""

from itertools import groupby

import torch

from isobatch_kernels.attention_proofs import as_candidate, fill_cache, reference_operator
from isobatch_kernels.attention_schedules import FEW_ROWS, AttentionSchedule, schedules
from isobatch_kernels.attention_tree import AttentionShape, tree_of
from isobatch_kernels.certification import CertificationRefused, Proof, prove_groups
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
    plan = operator_plan(_prove(shape, block_size, every, device, seed))
    _require_fold(plan, admitted_schedules(plan, shape, block_size))
    return plan


def reprove_attention(
    plan: OperatorPlan, shape: AttentionShape, block_size: int, device: torch.device, seed: int
) -> None:
    """Prove again what `plan` admitted. Raises `CertificationRefused` if some of it fails."""
    kept = admitted_schedules(plan, shape, block_size)
    _require_fold(plan, kept)
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
    tree = tree_of(shape)
    kinds = sorted(candidates, key=_kind)  # stable: preference stays
    groups = [
        tuple(as_candidate(cache, tree, schedule) for schedule in alike)
        for _, alike in groupby(kinds, key=_kind)
    ]
    return prove_groups(reference_operator(cache, tree, seed), groups, lambda *_: True)


def _require_fold(plan: OperatorPlan, admitted: tuple[AttentionSchedule, ...]) -> None:
    """Raise `CertificationRefused` where nothing could serve a decode."""
    if not any(s.rows == FEW_ROWS and not s.split for s in admitted):
        raise CertificationRefused(
            f"attention {plan.shape}: no fold of {FEW_ROWS} rows is admitted: {plan.refused}"
        )


def _kind(schedule: AttentionSchedule) -> tuple[int, bool, bool]:
    return schedule.rows, schedule.split, schedule.ticket
