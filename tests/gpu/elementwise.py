"""Certifies the row kernels on this card and times them beside vLLM's own.

`python -m tests.gpu.elementwise --out DIR --budget SECONDS`, kernels/ on the path. Writes
DIR/elementwise.json after every step and prints a table last. What fails is recorded, not fatal.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from isobatch_kernels.certification import CertificationRefused, certify
from isobatch_kernels.log_softmax import log_softmax
from isobatch_kernels.rms_norm import add_rms_norm, rms_norm
from isobatch_kernels.rope import rope
from isobatch_kernels.row_proofs import RowShapes, row_operators
from isobatch_kernels.silu_and_mul import silu_and_mul

from tests.gpu.stopwatch import Call, Deadline, facts, medians, save, say

SHAPES = {
    "llama-8b": RowShapes(4096, 14336, 40, 128, 128_256, torch.bfloat16, 300),
    "qwen3-0.6b": RowShapes(1024, 3072, 24, 128, 151_936, torch.bfloat16, 300),
}
ROWS = (1, 16, 64, 256, 1024, 8192)
ROTATED_BYTES = 200 << 20  # several times the L2 cache
MOST_BYTES = 16 << 30
Rival = Callable[..., object]


def rivals() -> dict[str, Rival]:
    """vLLM's own kernels by the names of ours; those that its build has."""
    try:
        import vllm._custom_ops as ops  # a machine without vLLM times ours alone
    except ImportError as exc:
        say(f"no vLLM: {exc}")
        return {}

    def norm(x: torch.Tensor, weight: torch.Tensor) -> None:
        ops.rms_norm(torch.empty_like(x), x, weight, 1e-6)

    def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        ops.fused_add_rms_norm(x, residual, weight, 1e-6)

    def silu(x: torch.Tensor) -> None:
        y = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
        torch.ops._C.silu_and_mul(y, x)

    return {"rms_norm": norm, "add_rms_norm": add_norm, "silu_and_mul": silu}


def prove(name: str, shapes: RowShapes, report: dict[str, object], deadline: Deadline) -> None:
    """Certify each row kernel of `shapes`; what was admitted and refused goes into `report`."""
    for operator in row_operators(shapes, torch.device("cuda"), {}, seed=5):
        key = f"{name}/{operator.name}"
        if deadline.passed():
            report[key] = "left out, the budget is spent"
            continue
        try:
            proof = certify(operator)
        except (CertificationRefused, RuntimeError, ValueError) as exc:
            report[key] = f"{type(exc).__name__}: {exc}"[:500]
            say(f"{key}: REFUSED {report[key]}")
            continue
        counts = {schedule: len(at) for schedule, at in proof.admitted.items()}
        report[key] = {"tree": proof.tree, "admitted": counts, "refused": proof.refused}
        say(f"{key}: row counts admitted {counts} {proof.refused or ''}")


def contenders(
    operator: str, shapes: RowShapes, rows: int, others: dict[str, Rival]
) -> tuple[dict[str, list[Call]], int]:
    """(calls by name, bytes that one call must move)."""
    device, dtype = torch.device("cuda"), shapes.dtype
    columns = {"silu_and_mul": 2 * shapes.intermediate, "log_softmax": shapes.vocabulary}
    width = columns.get(operator, shapes.hidden)
    one = rows * width * 2
    moved = {"rms_norm": 2, "add_rms_norm": 4, "silu_and_mul": 1.5, "log_softmax": 3}
    if 16 * one > MOST_BYTES and one > MOST_BYTES // 4:
        raise ValueError(f"{one >> 20} MiB a tensor")
    sets = max(1, min(16, -(-ROTATED_BYTES // one)))
    xs = [torch.randn(rows, width, device=device, dtype=dtype) for _ in range(sets)]
    weight = torch.ones(shapes.hidden, device=device, dtype=dtype)
    extra = {
        "rms_norm": (weight,),
        "add_rms_norm": (torch.zeros(rows, width, device=device, dtype=dtype), weight),
    }.get(operator, ())
    ours: dict[str, Callable[..., object]] = {
        "rms_norm": lambda x, w: rms_norm(x, w, 1e-6),
        "add_rms_norm": lambda x, r, w: add_rms_norm(x, r, w, 1e-6),
        "silu_and_mul": silu_and_mul,
        "log_softmax": log_softmax,
    }
    others = {**others, "log_softmax": lambda x: torch.log_softmax(x, -1, dtype=torch.float32)}
    found: dict[str, list[Call]] = {}
    for name, function in (("ours", ours[operator]), ("other", others.get(operator))):
        if function is not None:
            found[name] = [partial(function, x, *extra) for x in xs]
    return found, int(moved[operator] * one)


def rope_contenders(shapes: RowShapes, rows: int) -> tuple[dict[str, list[Call]], int]:
    """Ours alone: vLLM turns queries and keys in one call, of another layout."""
    x = torch.randn(rows, 2 * shapes.heads, shapes.head_size, device="cuda", dtype=shapes.dtype)
    query, key = x[:, : shapes.heads], x[:, shapes.heads :]
    table = torch.randn(4096, shapes.head_size, device="cuda")
    positions = torch.arange(rows, device="cuda") % 4096
    return {"ours": [lambda: rope(positions, query, key, table)]}, 2 * x.nbytes


def measure(
    name: str, operator: str, shapes: RowShapes, rows: int, others: dict[str, Rival]
) -> dict[str, object]:
    """One case: microseconds, bandwidth of ours, and speed over the rival."""
    if operator == "rope":
        calls, moved = rope_contenders(shapes, rows)
    else:
        calls, moved = contenders(operator, shapes, rows, others)
    failures: dict[str, str] = {}
    times = medians(calls, failures)
    ours, other = times.get("ours"), times.get("other")
    case: dict[str, object] = {
        "case": f"{operator} x {rows}",
        "microseconds": times,
        "terabytes_per_second": moved / ours / 1e6 if ours else None,
        "ratio": other / ours if ours and other else None,
        "failures": failures,
    }
    say(f"{name} {case['case']}: {times} us, {case['terabytes_per_second']} TB/s")
    return case


def run(folder: Path, deadline: Deadline) -> dict[str, object]:
    """Prove, then time, shape by shape; the report so far is on disk after every case."""
    proofs: dict[str, object] = {}
    cases: dict[str, list[dict[str, object]]] = {}
    report: dict[str, object] = {"facts": facts(), "proofs": proofs, "cases": cases}
    others = rivals()
    for name, shapes in SHAPES.items():
        prove(name, shapes, proofs, deadline)
        save(folder, "elementwise", report)
        found = cases.setdefault(name, [])
        for operator in ("rms_norm", "add_rms_norm", "silu_and_mul", "log_softmax", "rope"):
            for rows in ROWS:
                if deadline.passed():
                    say(f"{name}: cut short, the budget is spent")
                    break
                try:
                    found.append(measure(name, operator, shapes, rows, others))
                except Exception as exc:  # noqa: BLE001  # too large for the card, say
                    found.append({"case": f"{operator} x {rows}", "error": str(exc)[:500]})
                    say(f"{name} {operator} x {rows}: {exc}"[:300])
                    torch.cuda.empty_cache()
            save(folder, "elementwise", report)
    return report


def table(report: dict[str, object]) -> str:
    """A line a case: bandwidth, and ours over the rival in speed."""
    lines = ["shape, operator x rows, TB/s of ours, speed over vLLM's or torch's"]
    cases = report["cases"]
    assert isinstance(cases, dict)
    for name, found in cases.items():
        for case in found:
            numbers = (case.get("terabytes_per_second"), case.get("ratio"))
            text = "  ".join(f"{n:5.2f}" if isinstance(n, float) else "    -" for n in numbers)
            lines.append(f"{name:12} {case['case']:22} {text}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of elementwise.json")
    parser.add_argument("--budget", type=float, default=300, help="seconds")
    arguments = parser.parse_args()
    report = run(arguments.out, Deadline(arguments.budget))
    save(arguments.out, "elementwise", report)
    print(table(report), flush=True)


if __name__ == "__main__":
    main()
