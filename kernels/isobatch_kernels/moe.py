"""Performs a mixture of experts whose bits for a token do not depend on the batch.

Routing chooses per token, of equal scores the lower expert. A token's slot `t * top_k + s` is its
s-th expert; the grouped matmul computes each slot by the plain tree in K (`tree.plain_tree`), so
that the number of tokens an expert gets cannot reach it; the slots are added in slot order. Shared
experts are dense linears and no business of this module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import triton
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor

from isobatch_kernels.matmul import Loads, Tiling, check_device, check_linear, linear, tma_refusal
from isobatch_kernels.moe_kernels import combine_kernel, grouped_kernel, route_kernel

GROUPED_REFERENCE = Tiling(64, 128, 64, warps=4, stages=3, loads=Loads.POINTER)
_COMBINE_BLOCK = 1024


class Scoring(Enum):
    """How logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses: the `top_k` best of its scores, divided by their sum or as they are."""

    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    renormalize: bool = True


def route(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, E] -> (weights [T, top_k] float32, ids [T, top_k] int32), best first.

    One warp a token, whatever T is. Raises ValueError where top_k is not within 1..E or the last
    dimension of logits is not contiguous.
    """
    if logits.dim() != 2 or not 1 <= routing.top_k <= logits.shape[1] or logits.stride(1) != 1:
        raise ValueError(
            f"need logits [T, E] with contiguous columns and 1 <= top_k <= E; got "
            f"{list(logits.shape)} of strides {logits.stride()} and top_k {routing.top_k}"
        )
    check_device("logits", logits)
    tokens, experts = logits.shape
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    if tokens:
        route_kernel[(tokens,)](
            logits,
            weights,
            ids,
            experts,
            logits.stride(0),
            SIGMOID=routing.scoring is Scoring.SIGMOID,
            RENORMALIZE=routing.renormalize,
            TOP_K=routing.top_k,
            SLOTS=triton.next_power_of_2(routing.top_k),
            BLOCK=triton.next_power_of_2(experts),
            num_warps=1,  # a constant: the sum's tree follows the warps
        )
    return weights, ids


def route_reference(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route`, in torch: equal ids where no two scores are within rounding of each other."""
    x = logits.float()
    scores = x.softmax(-1) if routing.scoring is Scoring.SOFTMAX else x.sigmoid()
    ranked, ids = scores.sort(dim=-1, descending=True, stable=True)
    weights = ranked[:, : routing.top_k]
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids[:, : routing.top_k].int()


@dataclass(frozen=True, slots=True)
class Grouping:
    """Slots by expert, cut into tiles of at most `tokens`.

    `order` [slots] int32; `expert`, `start`, `stop` [tiles] int32: tile i is
    order[start[i] : stop[i]], all of one expert. Tiles past the last one used are empty.
    """

    tokens: int
    order: torch.Tensor
    expert: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor


def group_slots(ids: torch.Tensor, experts: int, tokens: int) -> Grouping:
    """Ids [T, top_k] in 0..experts-1 -> the tiles of `tokens` slots that cover them.

    Shapes follow from those of `ids` alone and nothing waits for the device: fit for a CUDA graph.
    A slot whose id is out of range is in no tile.
    """
    flat = ids.reshape(-1)
    ranked, order = flat.sort(stable=True)
    every = torch.arange(experts + 1, device=ids.device, dtype=flat.dtype)
    bounds = torch.searchsorted(ranked, every)
    counts = bounds.diff()
    last_tile = ((counts + tokens - 1) // tokens).cumsum(0)
    most = flat.numel() // tokens + min(experts, flat.numel())
    tile = torch.arange(most, device=ids.device)
    expert = torch.searchsorted(last_tile, tile, right=True).clamp(max=experts - 1)
    first_tile = last_tile[expert] - (counts[expert] + tokens - 1) // tokens
    start = bounds[expert] + (tile - first_tile) * tokens
    stop = torch.minimum(start + tokens, bounds[expert + 1])
    # A tile past the last one falls on the last expert, beyond its end: there it is empty.
    return Grouping(tokens, order.int(), expert.int(), start.int(), stop.int())


def grouped_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    grouping: Grouping,
    slots_per_row: int,
    tiling: Tiling = GROUPED_REFERENCE,
) -> torch.Tensor:
    """X [rows, K], w [E, N, K] -> [rows * slots_per_row, N]: slot s is row s // slots_per_row.

    By the plain tree in K, accumulated in float32 and rounded once. `grouping.tokens` must be the
    tiling's. Raises ValueError for operands that are not taken, RuntimeError where the kernel
    cannot be compiled.
    """
    _check_grouped(x, w, grouping, slots_per_row, tiling)
    slots, (_, features, terms) = grouping.order.numel(), w.shape
    y = torch.empty((slots, features), dtype=x.dtype, device=x.device)
    tiles = grouping.expert.numel()
    if not tiles:
        return y
    is_tma = tiling.loads is Loads.TMA
    weights = _flat_descriptor(w, tiling) if is_tma else w
    try:
        grouped_kernel[(tiles * -(-features // tiling.features),)](
            x, weights, y,
            grouping.order, grouping.expert, grouping.start, grouping.stop,
            tiles, features, terms, x.stride(0), w.stride(0), w.stride(1), y.stride(0),
            SLOTS_PER_ROW=slots_per_row, WHOLE_K=terms % tiling.depth == 0, TMA=is_tma,
            SWAP=tiling.swapped, TOKENS=tiling.tokens, FEATURES=tiling.features,
            DEPTH=tiling.depth, GROUP=tiling.group,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    except TritonError as exc:
        raise RuntimeError(f"{tiling.name}: {type(exc).__name__}: {exc}") from exc
    return y


def _check_grouped(
    x: torch.Tensor, w: torch.Tensor, grouping: Grouping, slots_per_row: int, tiling: Tiling
) -> None:
    if w.dim() != 3 or 0 in w.shape:
        raise ValueError(f"need w [E, N, K] with E, N, K >= 1, got {list(w.shape)}")
    check_linear(x, w[0], None)
    if slots_per_row < 1 or grouping.order.numel() != x.shape[0] * slots_per_row:
        raise ValueError(
            f"{grouping.order.numel()} slots are not {slots_per_row} for each of {x.shape[0]} rows"
        )
    if grouping.tokens != tiling.tokens:
        raise ValueError(
            f"slots are grouped by {grouping.tokens}, the tiling takes {tiling.tokens}"
        )
    if grouping.order.device != x.device:
        raise ValueError(f"slots are on {grouping.order.device}, x on {x.device}")


def _flat_descriptor(w: torch.Tensor, tiling: Tiling) -> TensorDescriptor:
    """W [E, N, K] as a descriptor of [E * N, K]."""
    experts, features, terms = w.shape
    if w.stride(0) != features * w.stride(1):
        raise ValueError(f"{tiling.name}: experts of w are not back to back: strides {w.stride()}")
    refusal = tma_refusal("w", w[0]) or tma_refusal("w", w.flatten(0, 1))
    if refusal is not None:
        raise ValueError(f"{tiling.name}: {refusal}")
    block = [tiling.features, tiling.depth]
    return TensorDescriptor(w, [experts * features, terms], [w.stride(1), 1], block)


def grouped_reference(
    x: torch.Tensor,
    w: torch.Tensor,
    ids: torch.Tensor,
    slots_per_row: int,
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = linear,
) -> torch.Tensor:
    """As `grouped_linear` for ids [T, top_k], expert by expert through a dense `matmul`.

    With `matmul.linear` it has the bits that the grouped kernel owes, with torch's own its values.
    """
    flat = ids.reshape(-1)
    y = torch.empty((flat.numel(), w.shape[1]), dtype=x.dtype, device=x.device)
    for expert in sorted(set(flat.tolist())):
        slots = (flat == expert).nonzero()[:, 0]
        y[slots] = matmul(x[slots // slots_per_row], w[expert])
    return y


def combine(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Y [T * top_k, H], weights [T, top_k] float32 -> [T, H] in y.dtype, slots added in order.

    Raises ValueError for other shapes, dtypes or strides.
    """
    tokens, top_k = weights.shape
    if y.dim() != 2 or y.shape[0] != tokens * top_k or y.stride(1) != 1:
        raise ValueError(
            f"need y [{tokens * top_k}, H] with contiguous columns, got {list(y.shape)}"
        )
    if weights.dtype != torch.float32 or not weights.is_contiguous() or weights.device != y.device:
        raise ValueError(f"need contiguous float32 weights on {y.device}, got {weights.dtype}")
    check_device("y", y)
    width = y.shape[1]
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    if tokens:
        combine_kernel[(tokens, -(-width // _COMBINE_BLOCK))](
            y, weights, out, width, y.stride(0), out.stride(0), TOP_K=top_k, BLOCK=_COMBINE_BLOCK
        )
    return out


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of one layer, `up` [E, I, H] and `down` [E, H, J].

    `activation` maps [S, I] to [S, J]; it is the model's, row-wise, and certified as such.
    """

    up: torch.Tensor
    down: torch.Tensor
    activation: Callable[[torch.Tensor], torch.Tensor]


def mixture(
    x: torch.Tensor,
    experts: Experts,
    chosen: tuple[torch.Tensor, torch.Tensor],
    tilings: tuple[Tiling, Tiling] = (GROUPED_REFERENCE, GROUPED_REFERENCE),
) -> torch.Tensor:
    """X [T, H] and `route`'s (weights, ids) -> [T, H]: up, activation, down, combination.

    `tilings` are those of up and down. Raises ValueError as `grouped_linear` does.
    """
    weights, ids = chosen
    up, down = (group_slots(ids, experts.up.shape[0], tiling.tokens) for tiling in tilings)
    hidden = experts.activation(grouped_linear(x, experts.up, up, ids.shape[1], tilings[0]))
    return combine(grouped_linear(hidden, experts.down, down, 1, tilings[1]), weights)


def combine_reference(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As `combine`, in torch, each multiply-add by way of float64."""
    tokens, top_k = weights.shape
    slots = y.view(tokens, top_k, -1).double()
    acc = torch.zeros(tokens, slots.shape[2], device=y.device)
    for slot in range(top_k):
        acc = (acc.double() + weights[:, slot, None].double() * slots[:, slot]).float()
    return acc.to(y.dtype)
