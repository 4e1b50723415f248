"""Performs sampling on a card: the kernels of vLLM's V2 sampler, certified as they stand.

Each of them gives a program to a row (or to a block of one) and draws noise from (seed, position)
alone, which is what strict asks of a sampler. Two steps are exchanged: vLLM filters few rows by a
sort and many by a kernel, and breaks ties of the top logprobs as torch.topk happens to.
"""

from functools import partial
from typing import Any

import torch
import triton
from isobatch_kernels.certification import Operator, Tensors
from isobatch_kernels.inputs import mixed_rows
from isobatch_kernels.log_softmax import TREE as LOG_SOFTMAX_TREE
from isobatch_kernels.log_softmax import log_softmax
from isobatch_kernels.row_proofs import RowKernel, kernel_operator
from isobatch_kernels.rows import pad_rows
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.sample.min_p import apply_min_p
from vllm.v1.worker.gpu.sample.penalties import apply_penalties

from isobatch_worker import seams
from isobatch_worker.sampler import SamplingShape, asked_of_filters, top_token_ids

SAMPLER = "gumbel-max/philox4x32/seed+position/vllm-0.26.0"
"""Names the noise in the fingerprint."""

_ROWS = 128
"""Rows proved; each is a program's alone, so more rows are more programs."""

_TREE = "vllm-0.26.0"


def sampling_operators(shape: SamplingShape, device: torch.device, seed: int) -> list[Operator]:
    """What a step samples with, for certification; nothing stands behind a refused one."""
    kernels = (
        ("gumbel", _TREE, _gumbel, _draw_race),
        ("temperature", _TREE, _temperature, _draw_temperature),
        ("min-p", _TREE, _min_p, _draw_share),
        ("top-k-top-p", _TREE, _filter, _draw_filter),
        ("penalties", _TREE, _penalties, _draw_penalties),
        ("log-softmax", LOG_SOFTMAX_TREE, _log_softmax, _draw_logits),
    )
    rows = min(_ROWS, shape.max_rows)
    name = f"vocabulary={shape.vocabulary} {shape.dtype}"
    return [
        kernel_operator(
            RowKernel(operator, tree, name, run, partial(draw, shape)), rows, device, seed
        )
        for operator, tree, run, draw in kernels
    ]


def install_sampler(runner: Any) -> None:
    """Exchange the two steps of `runner`'s sampler that are the batch's, not the row's."""
    runner.sampler.use_flashinfer = False  # a library that has not been read
    seams.choose_rows(filter_rows, top_logprobs)


def filter_rows(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """`logits` [B, V] with all but the top `k` [B] and the mass `p` [B] at -inf.

    A row that asks for neither (k = V, p = 1) is left as it is, whatever its neighbours ask.
    """
    if k is None and p is None:
        return logits
    rows = len(logits)
    k, p, asked = asked_of_filters(logits, k, p)
    # The kernel is compiled for each number of rows: by powers of two there are few.
    most = triton.next_power_of_2(rows)
    padded = (pad_rows(x, most) for x in (logits.clone(), k, p))
    filtered = apply_top_k_top_p_triton(*padded)[:rows]
    return torch.where(asked.unsqueeze(1), filtered, logits)


def top_logprobs(
    logits: torch.Tensor, num_logprobs: int, sampled_token_ids: torch.Tensor, *_: Any, **named: Any
) -> LogprobsTensors:
    """Logprobs of the tokens sampled [B] and of the `num_logprobs` likeliest, equals by token id.

    `logprob_token_ids` is no part of strict (it gives every row of the batch the form that one
    asks for), nor are logits in place of logprobs.
    """
    values = logits.float() if named.get("logits_mode") else log_softmax(logits)
    chosen = sampled_token_ids.to(torch.int64).unsqueeze(-1)
    mine = values.gather(-1, chosen)
    ids = torch.cat((chosen, top_token_ids(values, num_logprobs)), dim=1)
    return LogprobsTensors(ids, values.gather(-1, ids), (values >= mine).sum(-1))


def _whole(rows: torch.Tensor) -> torch.Tensor:
    """[B] int32: row r's request is r."""
    return torch.arange(len(rows), dtype=torch.int32, device=rows.device)


def _gumbel(
    x: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> Tensors:
    sampled = gumbel_sample(x, _whole(x), temperature, seeds, positions, apply_temperature=False)
    return (sampled,)


def _temperature(x: torch.Tensor, temperature: torch.Tensor) -> Tensors:
    apply_temperature(x, _whole(x), temperature)
    return (x,)


def _min_p(x: torch.Tensor, share: torch.Tensor) -> Tensors:
    apply_min_p(x, _whole(x), share)
    return (x,)


def _filter(x: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Tensors:
    return (filter_rows(x, k, p),)


def _penalties(
    x: torch.Tensor, penalties: torch.Tensor, mask: torch.Tensor, counts: torch.Tensor
) -> Tensors:
    repetition, frequency, presence = penalties.t().contiguous()
    nothing = torch.zeros(len(x), dtype=torch.int32, device=x.device)  # no drafts
    apply_penalties(x, _whole(x), nothing, nothing, repetition, frequency, presence, mask, counts)
    return (x,)


def _log_softmax(x: torch.Tensor) -> Tensors:
    return (log_softmax(x),)


def _logits(shape: SamplingShape, rows: int, generator: torch.Generator) -> torch.Tensor:
    return 4 * mixed_rows(rows, shape.vocabulary, shape.dtype, generator)


def _flat(shape: SamplingShape, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Logits near each other, so that filters keep many and ties are common."""
    return (4 * torch.randn(rows, shape.vocabulary, generator=generator)).to(shape.dtype)


def _draw_logits(shape: SamplingShape, rows: int, generator: torch.Generator) -> Tensors:
    return (_logits(shape, rows, generator),)


def _draw_race(shape: SamplingShape, rows: int, generator: torch.Generator) -> Tensors:
    temperature = torch.ones(rows)
    temperature[::4] = 0.0  # greedy
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 2**20, (rows,), generator=generator)
    return _flat(shape, rows, generator), temperature, seeds, positions


def _draw_temperature(shape: SamplingShape, rows: int, generator: torch.Generator) -> Tensors:
    temperature = 0.05 + 2 * torch.rand(rows, generator=generator)
    temperature[::4], temperature[1::4] = 0.0, 1.0
    return _logits(shape, rows, generator), temperature


def _draw_share(shape: SamplingShape, rows: int, generator: torch.Generator) -> Tensors:
    share = torch.rand(rows, generator=generator)
    share[::4] = 0.0
    return _flat(shape, rows, generator), share


def _draw_filter(shape: SamplingShape, rows: int, generator: torch.Generator) -> Tensors:
    most = shape.vocabulary
    k = torch.randint(1, most + 1, (rows,), generator=generator, dtype=torch.int32)
    k[::2] = most
    k[1::4] = torch.randint(1, 100, k[1::4].shape, generator=generator, dtype=torch.int32)
    p = torch.rand(rows, generator=generator)
    p[1::3] = 1.0
    return _flat(shape, rows, generator), k, p


def _draw_penalties(shape: SamplingShape, rows: int, generator: torch.Generator) -> Tensors:
    penalties = 4 * torch.rand(rows, 3, generator=generator) - 2
    penalties[:, 0] = 0.5 + torch.rand(rows, generator=generator)
    words = -(-shape.vocabulary // 32)
    mask = torch.randint(-(2**31), 2**31, (rows, words), generator=generator).to(torch.int32)
    counts = torch.randint(0, 3, (rows, shape.vocabulary), generator=generator, dtype=torch.int32)
    return _logits(shape, rows, generator), penalties, mask, counts
