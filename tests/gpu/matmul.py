"""Certifies and times the linears of four models: `python -m tests.gpu.matmul --out DIR`.

For each shape: proofs of every schedule at every row count, then default cuBLAS against the fastest
admitted one, in one run, interleaved. Writes DIR/matmul.json after each shape; prints a table last.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from isobatch_kernels.bits import as_bits, same_bits
from isobatch_kernels.certification import Proof, Schedule
from isobatch_kernels.cublas import LIBRARIES, library_linear
from isobatch_kernels.inputs import FAMILIES
from isobatch_kernels.matmul import Tiling, linear
from isobatch_kernels.matmul_operator import Linear, linear_operator, probe_rows, prove_each
from isobatch_kernels.matmul_schedules import CertifiedLinear, all_tilings, choose, serves
from isobatch_kernels.reveal import Setting, reveal
from isobatch_kernels.timing import Times, rotated_weights, time_calls
from isobatch_kernels.tree import Tree, family_of, linear_tree

from tests.gpu.record import Budget, Record, attempted, environment, measure_each, say
from tests.gpu.shapes import SHAPES, Shape

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
CHECKED_ROWS = (3, 5, 11, 20, 40, 77, 100, 150, 200, 300, 700, 1000, 1500, 3000, 5000)
RIVAL = "torch.nn.functional.linear"
DTYPE = torch.bfloat16
SEED = 20260101
_L2_BYTES = 60 << 20


def compile_all(budget: Budget) -> dict[str, str]:
    """Compile every tiling, many at a time; name -> error of those that failed twice."""
    x, w = (torch.randn(17, 1024, device="cuda").to(DTYPE) for _ in range(2))

    def compiled(tiling: Tiling) -> None:
        linear(x, w, tiling=tiling)
        torch.cuda.synchronize()

    def run(tiling: Tiling) -> Any:
        return attempted(partial(compiled, tiling))

    with ThreadPoolExecutor(8) as pool:
        first = dict(zip(all_tilings(), pool.map(run, all_tilings()), strict=True))
    failed = {t.name: run(t) for t, error in first.items() if error is not None}
    errors = {name: error for name, error in failed.items() if error is not None}
    say(budget, f"compiled {len(first) - len(errors)} of {len(first)} tilings")
    return errors


def tree_of(n: int, k: int) -> Tree:
    return linear_tree(n, k, DTYPE, family_of(torch.cuda.get_device_capability()))


def prove(shape: Shape, weight: torch.Tensor) -> Proof:
    linear_ = Linear(weight, None, tree_of(shape.n, shape.k), shape.max_rows)
    return prove_each(linear_operator(linear_, SEED), serves)


def controls() -> dict[str, str | None]:
    """Planted wrong schedules: what certification and `reveal` say of each. None would be blind."""
    weight = probe_rows(1024, 4096, DTYPE, torch.device("cuda"), SEED)
    linear_ = Linear(weight, None, tree_of(1024, 4096), 64)

    def split(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        parts = [linear(x[:, own], w[:, own]).float() for own in (slice(half), slice(half, None))]
        return (parts[0] + parts[1]).to(x.dtype)

    def by_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return split(x, w) if x.shape[0] <= 16 else linear(x, w)

    planted = (
        Schedule("split", lambda x: (split(x, weight),)),
        Schedule("depth-by-rows", lambda x: (by_rows(x, weight),)),
    )
    operator = replace(linear_operator(linear_, SEED), candidates=planted)
    refused = prove_each(operator, lambda *_: True).refused
    setting = Setting(rows=8, n=1024, dtype=DTYPE, device=torch.device("cuda"))
    return {
        "certification of a split": refused.get("split"),
        "certification of a depth chosen by rows": refused.get("depth-by-rows"),
        "reveal of a split": reveal(split, linear_.tree, setting),
    }


def reveal_refused(shape: Shape, proof: Proof) -> dict[str, str | None]:
    """What tree the libraries have where they were refused: at their first such row count."""
    said: dict[str, str | None] = {}
    proved = {rows for at in proof.admitted.values() for rows in at}
    for library in LIBRARIES:
        missing = sorted(proved - proof.admitted.get(library.name, frozenset()))
        if missing:
            setting = Setting(missing[0], shape.n, DTYPE, torch.device("cuda"))
            run = partial(library_linear, library)
            tree = tree_of(shape.n, shape.k)
            said[f"{library.name} at {missing[0]} rows"] = reveal(run, tree, setting)
    return said


def disagreements(shape: Shape, weight: torch.Tensor) -> dict[str, int]:
    """Outputs of 96 rows where a library differs from the reference, by kinds of input."""
    x = probe_rows(96, shape.k, DTYPE, weight.device, SEED)
    wanted = as_bits(linear(x, weight))
    counts: dict[str, int] = {}
    for library in LIBRARIES:
        differs = as_bits(library_linear(library, x, weight)) != wanted
        for i, of_row in enumerate(FAMILIES):
            for j, of_weight in enumerate(FAMILIES):
                count = int(differs[i :: len(FAMILIES), j :: len(FAMILIES)].sum())
                if count:
                    counts[f"{library.name}: {of_row.name} x {of_weight.name}"] = count
    return counts


def schedule_calls(proof: Proof, rows: int, x: torch.Tensor) -> dict[str, Callable[..., object]]:
    """What may serve `rows` rows, each a call of the weight, and the rival."""
    calls: dict[str, Callable[..., object]] = {RIVAL: lambda w: torch.nn.functional.linear(x, w)}
    for library in LIBRARIES:
        if rows in proof.admitted.get(library.name, frozenset()):
            calls[library.name] = partial(library_linear, library, x)
    for tiling in all_tilings():
        if rows in proof.admitted.get(tiling.name, frozenset()):
            calls[tiling.name] = partial(linear, x, tiling=tiling)
    return calls


def timed(shape: Shape, weight: torch.Tensor, proof: Proof, budget: Budget) -> dict[int, Any]:
    """Row count -> times of all, then rival and fastest once more by themselves."""
    found: dict[int, Any] = {}
    for rows in (r for r in ROWS if r <= shape.max_rows):
        if budget.is_spent():
            break
        enough = 5 * _L2_BYTES if rows <= 512 else 1
        weights = rotated_weights(weight, enough, most=64)
        x = torch.randn(rows, shape.k, device="cuda").to(DTYPE)
        calls = schedule_calls(proof, rows, x)
        first = time_calls(calls, weights, rounds=5)
        found[rows] = _again(calls, weights, first)
    return found


def _again(
    calls: dict[str, Callable[..., object]], weights: list[torch.Tensor], first: Times
) -> dict[str, Any]:
    # The least of many noisy times is biased low: the ratio comes from a second measurement.
    ours = {name: t for name, t in first.seconds.items() if name != RIVAL}
    result: dict[str, Any] = {"seconds": first.seconds, "failed": first.failed}
    if ours and RIVAL in first.seconds:
        best = min(ours, key=lambda name: ours[name])
        second = time_calls({n: calls[n] for n in (RIVAL, best)}, weights, rounds=9).seconds
        result |= {"chosen": best, "ratio": second[RIVAL] / second[best], "second": second}
    return result


def check_served(shape: Shape, weight: torch.Tensor, proof: Proof, times: dict[int, Any]) -> str:
    """Whether the linear as it serves keeps the reference's bits at row counts never proved."""
    ours = {
        rows: {name: t for name, t in found["seconds"].items() if name != RIVAL}
        for rows, found in times.items()
    }
    serve = CertifiedLinear(choose(proof, ours))
    x = probe_rows(min(shape.max_rows, 5000), shape.k, DTYPE, weight.device, SEED + 7)
    whole = linear(x, weight)
    checked = [rows for rows in CHECKED_ROWS if rows <= len(x)]
    wrong = [r for r in checked if not same_bits(serve(x[-r:].clone(), weight), whole[-r:])]
    return f"differs at {wrong}" if wrong else f"equal at {checked}"


def measure(shape: Shape, budget: Budget) -> dict[str, Any]:
    """All that is found of one shape."""
    started = time.monotonic()
    weight = probe_rows(shape.n, shape.k, DTYPE, torch.device("cuda"), SEED)
    proof = prove(shape, weight)
    torch.cuda.synchronize()
    proved_in = time.monotonic() - started
    revealed = attempted(lambda: reveal_refused(shape, proof))
    differing = attempted(partial(disagreements, shape, weight))
    # Real values for the timing: special ones could make a card draw another power.
    weight = torch.randn(shape.n, shape.k, device="cuda").to(DTYPE)
    times = timed(shape, weight, proof, budget)
    return {
        **asdict(shape),
        "tree": proof.tree,
        "certified_seconds": proved_in,
        "comparisons": proof.comparisons,
        "admitted": {name: sorted(at) for name, at in proof.admitted.items()},
        "refused": proof.refused,
        "revealed": revealed,
        "library_differs": differing,
        "times": times,
        "served": attempted(lambda: check_served(shape, weight, proof, times)),
    }


def _initial(name: str) -> str:
    return {"cublaslt-no-split": "L", "cublas": "C"}.get(name, "P" if "pointer" in name else "T")


def print_table(results: list[dict[str, Any]]) -> None:
    """Ratios to the rival, above 1 is faster; L cuBLASLt, C cuBLAS, T TMA, P pointer."""
    print(f"{'model':14}{'layer':9}{'cert s':>7} " + "".join(f"{rows:>7}" for rows in ROWS))
    for result in results:
        head = f"{result['model']:14}{result['layer']:9}"
        if "error" in result:
            print(f"{head} {result['error'][:120]}")
            continue
        cells = [result["times"].get(rows, {}) for rows in ROWS]
        text = "".join(
            f"{c['ratio']:6.2f}{_initial(c['chosen'])}" if "ratio" in c else f"{'-':>7}"
            for c in cells
        )
        print(f"{head}{result['certified_seconds']:7.2f} {text}  {result['served'][:40]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for matmul.json")
    parser.add_argument("--budget", type=float, default=420, help="seconds; then no new work")
    parser.add_argument("--model", action="append", help="only this model; may be given again")
    options = parser.parse_args()
    budget = Budget(options.budget)
    torch.manual_seed(SEED)
    record = Record(options.out / "matmul.json", dict[str, Any](environment()))
    say(budget, str(environment()))
    record.data["compile_errors"] = compile_all(budget)
    record.data["controls"] = attempted(controls)
    say(budget, f"planted faults: {record.data['controls']}")
    wanted = [s for s in SHAPES if not options.model or s.model in options.model]
    print_table(measure_each(wanted, measure, budget, record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
