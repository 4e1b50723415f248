"""Certifies and times grouped matmuls on the card: `python -m tests.gpu.moe --out DIR`.

Experts of Qwen3-30B-A3B and Mixtral 8x7B against torch's grouped matmul on tokens sorted
beforehand, which therefore gathers nothing. Writes DIR/moe.json; prints a table last.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from isobatch_kernels.certification import Proof
from isobatch_kernels.matmul_operator import probe_rows, prove_each
from isobatch_kernels.moe import group_slots, grouped_linear
from isobatch_kernels.moe_operator import (
    GROUPED_TILINGS,
    Grouped,
    draw_ids,
    grouped_operator,
    serves_slots,
)
from isobatch_kernels.timing import rotated_weights, time_calls
from isobatch_kernels.tree import family_of, linear_tree

from tests.gpu.record import Budget, Record, environment, measure_each
from tests.gpu.shapes import EXPERT_SHAPES, ExpertShape

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
RIVAL = "torch.nn.functional.grouped_mm"
DTYPE = torch.bfloat16
SEED = 20260101
_LEAST_BYTES = 300 << 20  # five times the L2


def prove(shape: ExpertShape) -> Proof:
    device = torch.device("cuda")
    flat = probe_rows(shape.experts * shape.n, shape.k, DTYPE, device, SEED)
    tree = linear_tree(shape.n, shape.k, DTYPE, family_of(torch.cuda.get_device_capability()))
    w = flat.view(shape.experts, shape.n, shape.k)
    grouped = Grouped(w, shape.top_k, shape.slots_per_row, tree, max_tokens=TOKENS[-1])

    def is_worth_it(name: str, tokens: int) -> bool:
        return serves_slots(name, tokens * shape.top_k / shape.experts)

    return prove_each(grouped_operator(grouped, SEED), is_worth_it)


def calls_for(
    shape: ExpertShape, tokens: int, proof: Proof
) -> dict[str, Callable[[torch.Tensor], object]]:
    """What may serve `tokens` tokens spread over the experts, and the rival."""
    ids = draw_ids(tokens, shape.experts, shape.top_k, shape.experts, SEED).cuda()
    rows = tokens * shape.top_k // shape.slots_per_row
    x = torch.randn(rows, shape.k, device="cuda").to(DTYPE)
    flat = ids.view(-1).long()
    ranked = x[flat.argsort(stable=True) // shape.slots_per_row]
    ends = torch.bincount(flat, minlength=shape.experts).cumsum(0).int()
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        RIVAL: lambda w: torch.nn.functional.grouped_mm(ranked, w.transpose(1, 2), offs=ends)
    }
    for tiling in GROUPED_TILINGS:
        if tokens in proof.admitted.get(tiling.name, frozenset()):
            grouping = group_slots(ids, shape.experts, tiling.tokens)
            slots = shape.slots_per_row
            calls[tiling.name] = partial(_grouped, x, grouping, slots, tiling)
    return calls


def _grouped(x: Any, grouping: Any, slots: int, tiling: Any, w: torch.Tensor) -> torch.Tensor:
    return grouped_linear(x, w, grouping, slots, tiling)


def measure(shape: ExpertShape, budget: Budget) -> dict[str, Any]:
    """All that is found of one shape."""
    started = time.monotonic()
    proof = prove(shape)
    torch.cuda.synchronize()
    proved_in = time.monotonic() - started
    w = torch.randn(shape.experts, shape.n, shape.k, device="cuda", dtype=DTYPE)
    times: dict[int, Any] = {}
    for tokens in TOKENS:
        if budget.is_spent():
            break
        calls = calls_for(shape, tokens, proof)
        weights = rotated_weights(w, _LEAST_BYTES, most=4)
        first = time_calls(calls, weights, rounds=5)
        found: dict[str, Any] = {"seconds": first.seconds, "failed": first.failed}
        ours = {name: t for name, t in first.seconds.items() if name != RIVAL}
        if ours:
            best = min(ours, key=lambda name: ours[name])
            pair = {name: calls[name] for name in (RIVAL, best) if name in first.seconds}
            second = time_calls(pair, weights, rounds=9).seconds
            found |= {"chosen": best, "second": second}
            if RIVAL in second:
                found["ratio"] = second[RIVAL] / second[best]
        times[tokens] = found
    return {
        **asdict(shape),
        "tree": proof.tree,
        "certified_seconds": proved_in,
        "comparisons": proof.comparisons,
        "admitted": {name: sorted(at) for name, at in proof.admitted.items()},
        "refused": proof.refused,
        "times": times,
    }


def print_table(results: list[dict[str, Any]]) -> None:
    """Ratios to the rival (above 1 is faster), and microseconds of the fastest admitted tiling."""
    print(f"{'model':15}{'layer':6}{'cert s':>7} " + "".join(f"{tokens:>11}" for tokens in TOKENS))
    for result in results:
        head = f"{result['model']:15}{result['layer']:6}"
        if "error" in result:
            print(f"{head} {result['error'][:160]}")
            continue
        cells = []
        for tokens in TOKENS:
            found = result["times"].get(tokens, {})
            if "chosen" in found:
                micros = found["second"][found["chosen"]] * 1e6
                cells.append(f"{found.get('ratio', float('nan')):5.2f}/{micros:5.0f}")
        print(f"{head}{result['certified_seconds']:7.2f} {''.join(map('{:>11}'.format, cells))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for moe.json")
    parser.add_argument("--budget", type=float, default=120, help="seconds; then no new work")
    options = parser.parse_args()
    budget = Budget(options.budget)
    torch.manual_seed(SEED)
    record = Record(options.out / "moe.json", dict[str, Any](environment()))
    print_table(measure_each(EXPERT_SHAPES, measure, budget, record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
