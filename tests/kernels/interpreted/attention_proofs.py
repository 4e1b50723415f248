"""Certification of attention in the interpreter: it admits our schedules and refuses wrong ones."""

# Triton's language: untyped, with upper-case constants and many arguments.
# ruff: noqa: N803, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import pytest
import torch
import triton
import triton.language as tl
from isobatch_kernels import attention, attention_kernels, attention_plan, paged_attention
from isobatch_kernels.attention_kernels import _merge
from isobatch_kernels.attention_proofs import (
    FilledCache,
    attention_operators,
    fill_cache,
    schedule_call,
    workspace_of,
)
from isobatch_kernels.attention_schedules import (
    AttentionSchedule,
    Launch,
    chunks_of,
)
from isobatch_kernels.attention_tree import AttentionShape, AttentionTree
from isobatch_kernels.certification import CertificationRefused, Proof, Schedule, Tensors, certify
from isobatch_kernels.paged_attention import run_launch
from isobatch_kernels.plan import OperatorPlan

import tests.kernels.interpreter  # noqa: F401  # mends the interpreter

SHAPE = AttentionShape(2, 1, 16, torch.bfloat16, scale=0.25)
TREE = AttentionTree(chunk=32, key_tile=16)
SPLIT = AttentionSchedule(16, 4, 2, split=True)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> FilledCache:
    """A small cache, and batches that the interpreter can compute in seconds."""
    batches = (((1, 1), (1, 70), (3, 80), (1, 99)), ((20, 90), (1, 100)), ((9, 100),))
    monkeypatch.setattr(attention, "BATCHES", batches)
    monkeypatch.setattr(paged_attention, "_CHUNKS_AHEAD", 2)
    return fill_cache(SHAPE, 16, 100, torch.device("cpu"), seed=0)


def proof_of(cache: FilledCache, planted: Schedule) -> Proof:
    (operator,) = attention_operators(cache, TREE, (), (planted,), seed=1)
    return certify(operator)


def test_schedules_of_one_tree_are_admitted(cache: FilledCache) -> None:
    candidates = (AttentionSchedule(32, 4, 2), SPLIT, AttentionSchedule(16, 4, 2, tma=True))

    for operator in attention_operators(cache, TREE, candidates, (), seed=1):
        proof = certify(operator)
        assert proof.refused == {}
        assert set(proof.admitted.values()) == {frozenset({0})}


def test_chunk_size_that_follows_the_batch_is_refused(cache: FilledCache) -> None:
    short = schedule_call(cache, AttentionTree(16, 16), SPLIT, 2)
    long = schedule_call(cache, TREE, SPLIT, 2)

    def run(*inputs: torch.Tensor) -> Tensors:
        return ((short if inputs[1].numel() == 1 else long)(*inputs),)

    assert "differs first" in proof_of(cache, Schedule("planted", run)).refused["planted"]


def test_key_tile_that_follows_the_batch_is_refused(cache: FilledCache) -> None:
    wide = schedule_call(cache, AttentionTree(32, 32), AttentionSchedule(16, 4, 2), 1)

    def run(*inputs: torch.Tensor) -> Tensors:
        return (wide(*inputs),)

    assert "differs first" in proof_of(cache, Schedule("planted", run)).refused["planted"]


@triton.jit
def _fold_backwards(out_ptr, m_ptr, sum_ptr, acc_ptr, chunks_ptr, part_chunks, SIZE: tl.constexpr):
    row = tl.program_id(0)
    chunks = tl.load(chunks_ptr + row)
    column = tl.arange(0, SIZE)
    top = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, SIZE], tl.float32)
    for back in range(chunks):
        slot = row * part_chunks + chunks - 1 - back + tl.arange(0, 1)
        a = tl.load(acc_ptr + slot[:, None] * SIZE + column[None, :])
        m, part = tl.load(m_ptr + slot), tl.load(sum_ptr + slot)
        top, total, acc = _merge(top, total, acc, m, part, a)
    y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row + tl.arange(0, 1))[:, None] * SIZE + column[None, :], y)


def test_fold_in_another_order_is_refused(cache: FilledCache) -> None:
    def run(*inputs: torch.Tensor) -> Tensors:
        batch = cache.batch(*inputs)
        slots = batch.requests * batch.max_query_len
        scratch = workspace_of(SHAPE, TREE, batch)
        run_launch(SHAPE, TREE, batch, Launch(SPLIT, 1, batch.max_query_len, 2), scratch)
        rows = slots * SHAPE.heads
        cells = rows * chunks_of(TREE, batch.max_seq_len)
        start = -(-cells // 32) * 32
        seen = batch.seq_lens[:1] - inputs[1][:1] + 1 + torch.arange(batch.max_query_len)
        chunks = ((seen - 1) // TREE.chunk + 1).repeat_interleave(SHAPE.heads).to(torch.int32)
        floats = scratch.floats
        parts = floats, floats[start:], floats[2 * start :]
        count = chunks_of(TREE, batch.max_seq_len)
        # The batches with one request alone are folded backwards: one is enough to be refused.
        if batch.requests == 1:
            _fold_backwards[(rows,)](batch.out, *parts, chunks, count, SIZE=16)
        return (batch.out,)

    assert "differs first" in proof_of(cache, Schedule("planted", run)).refused["planted"]


@triton.jit
def _step_by_sum(s, v, ones, key, position, m, part, a, scales, window, SOFTCAP, WINDOWED):
    s = tl.where(key[None, :] <= position[:, None], s, -float("inf"))
    new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(new == -float("inf"), 0.0, new) * scales[0]
    p = tl.exp2(tl.fma(s, scales[0], -base[:, None]))
    kept = tl.exp2(m * scales[0] - base)
    a = tl.dot(p.to(v.dtype), v, a * kept[:, None])
    part = part * kept[:, None] + tl.sum(p, 1)[:, None]
    return new, part, a


def test_row_sum_across_lanes_is_refused(
    cache: FilledCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = schedule_call(cache, TREE, AttentionSchedule(32, 4, 2), 1)

    def run(*inputs: torch.Tensor) -> Tensors:
        with monkeypatch.context() as patch:
            patch.setattr(attention_kernels, "_tile_step", _step_by_sum)
            return (planted(*inputs),)

    assert "differs first" in proof_of(cache, Schedule("planted", run)).refused["planted"]


def test_plan_admits_a_schedule_of_each_kind_and_is_proved_again(
    cache: FilledCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "_LONGEST", cache.max_seq_len)
    monkeypatch.setattr(attention, "batches_for", lambda _: attention.BATCHES)
    device = torch.device("cpu")

    plan = attention_plan.plan_attention(SHAPE, 16, device, seed=2)
    attention_plan.reprove_attention(plan, SHAPE, 16, device, seed=3)

    admitted = attention_plan.admitted_schedules(plan, SHAPE, 16)
    kinds = {(s.rows, s.split, s.ticket) for s in admitted}
    assert {(16, False, False), (16, True, False), (16, True, True)} < kinds
    assert len(kinds) == len(admitted)
    assert plan.refused == {}


def test_plan_without_a_fold_for_decodes_is_refused() -> None:
    plan = OperatorPlan(
        operator="attention", shape="s", tree="t", admitted={}, refused={}, comparisons=0
    )

    with pytest.raises(CertificationRefused, match="no fold of 16 rows is admitted"):
        attention_plan.reprove_attention(plan, SHAPE, 16, torch.device("cpu"), seed=3)
