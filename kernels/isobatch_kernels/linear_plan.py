"""Performs the certification of one linear shape on this card: proof, times, and so the choice.

What is admitted is proved; what serves of it is timed, here and now. Two workers may choose
otherwise and have the same bits.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from isobatch_kernels.certification import CertificationRefused, Proof
from isobatch_kernels.cublas import LIBRARIES, Library, library_linear
from isobatch_kernels.matmul import Tiling, linear
from isobatch_kernels.matmul_operator import (
    ROW_COUNTS,
    Linear,
    linear_operator,
    probe_rows,
    prove_each,
)
from isobatch_kernels.matmul_schedules import Choice, all_tilings, choose, serves
from isobatch_kernels.plan import OperatorPlan, operator_plan, proof_of
from isobatch_kernels.timing import rotated_weights, time_calls
from isobatch_kernels.tree import family_of, linear_tree

CAPTURED_ROWS = (*range(8, 257, 8), *range(272, 513, 16))
"""What vLLM pads a decoding batch to: the row counts that serve most."""

TIMED_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
_ROUNDS = 7
_MANY_ROWS, _FASTEST = 2048, 8
"""Above so many rows, where a call takes milliseconds, only the fastest at fewer are timed."""

_L2_BYTES = 192 << 20  # of weights in turn, past any cache

SAMPLED_ROWS = (1, 3, 16, 64, 257)
"""Row counts at which a kept plan is proved again."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """y = x W^T (+ b) with W [n, k]; `max_rows` is the most that one call is given."""

    n: int
    k: int
    dtype: torch.dtype
    has_bias: bool
    max_rows: int

    @property
    def name(self) -> str:
        """`NxK dtype`, with `+bias` where there is one: as `Linear.shape` has it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.n}x{self.k} {dtype}{'+bias' * self.has_bias}"


def plan_linear(shape: LinearShape, device: torch.device, seed: int) -> OperatorPlan:
    """Prove every schedule of `shape`, time the admitted, choose. Raises `CertificationRefused`."""
    subject = _subject(shape, device, seed)
    # A server under load fills its budget of tokens, so that the most rows are a common count.
    rows = sorted({*ROW_COUNTS, *CAPTURED_ROWS, shape.max_rows})
    proof = prove_each(linear_operator(subject, seed, rows), serves)
    choice = choose(proof, _spread(_times(subject, proof, seed), rows))
    spans = {end: tiling.name for end, tiling in choice.spans.items()}
    return operator_plan(proof).model_copy(update={"exact": dict(choice.exact), "spans": spans})


def reprove_linear(plan: OperatorPlan, shape: LinearShape, device: torch.device, seed: int) -> None:
    """Prove on a sample that what `plan` chose still has the reference's bits.

    Raises `CertificationRefused` with the counterexample if it has not.
    """
    subject = _subject(shape, device, seed)
    choice = choice_of(plan)
    rows = tuple(r for r in SAMPLED_ROWS if r <= shape.max_rows)
    proof = prove_each(
        linear_operator(subject, seed, rows), lambda name, count: choice.name_for(count) == name
    )
    for count in rows:
        name = choice.name_for(count)
        if count not in proof.admitted.get(name, frozenset()):
            reason = proof.refused.get(name, "it is no schedule of this version")
            raise CertificationRefused(
                f"linear {plan.shape}: the kept plan chose {name} at {count} rows, which is not "
                f"admitted any more: {reason}"
            )


def choice_of(plan: OperatorPlan) -> Choice:
    """The choice that `plan` keeps, without what it did not admit.

    Raises `ValueError` for a schedule that this version does not have.
    """
    tilings = {tiling.name: tiling for tiling in all_tilings()}
    unknown = sorted(set(plan.spans.values()) - tilings.keys())
    if unknown:
        raise ValueError(f"linear {plan.shape}: no schedules of this version: {unknown}")
    proved = proof_of(plan).admitted
    exact = {rows: name for rows, name in plan.exact.items() if rows in proved.get(name, ())}
    return Choice(exact, {end: tilings[name] for end, name in plan.spans.items()})


def _subject(shape: LinearShape, device: torch.device, seed: int) -> Linear:
    w = probe_rows(shape.n, shape.k, shape.dtype, device, seed + 1)
    bias = probe_rows(1, shape.n, shape.dtype, device, seed + 2)[0] if shape.has_bias else None
    family = family_of(torch.cuda.get_device_capability(device))
    tree = linear_tree(shape.n, shape.k, shape.dtype, family)
    return Linear(w, bias, tree, shape.max_rows)


def _times(subject: Linear, proof: Proof, seed: int) -> dict[int, dict[str, float]]:
    """Seconds by row count and admitted schedule, weights coming from memory as in a model."""
    w = subject.w
    weights = rotated_weights(torch.randn_like(w), _L2_BYTES, most=4)
    found: dict[int, dict[str, float]] = {}
    libraries = {library.name for library in LIBRARIES}
    for rows in sorted({*(r for r in TIMED_ROWS if r < subject.max_rows), subject.max_rows}):
        x = torch.randn(
            rows, w.shape[1], device=w.device, generator=torch.Generator(w.device).manual_seed(seed)
        ).to(w.dtype)
        calls = _calls(proof, rows, x, subject.bias)
        if rows > _MANY_ROWS and found:
            before = found[max(found)]
            worth = {*sorted(before, key=before.__getitem__)[:_FASTEST], *libraries}
            calls = {name: call for name, call in calls.items() if name in worth}
        found[rows] = time_calls(calls, weights, _ROUNDS).seconds
    return found


def _calls(
    proof: Proof, rows: int, x: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Callable[[torch.Tensor], object]]:
    def is_admitted(name: str) -> bool:
        return rows in proof.admitted.get(name, frozenset())

    libraries = [
        (library.name, partial(_by_library, library, x, bias))
        for library in LIBRARIES
        if is_admitted(library.name)
    ]
    tilings = [
        (tiling.name, partial(_by_tiling, tiling, x, bias))
        for tiling in all_tilings()
        if is_admitted(tiling.name)
    ]
    return dict(libraries + tilings)


def _by_library(
    library: Library, x: torch.Tensor, bias: torch.Tensor | None, w: torch.Tensor
) -> torch.Tensor:
    return library_linear(library, x, w, bias)


def _by_tiling(
    tiling: Tiling, x: torch.Tensor, bias: torch.Tensor | None, w: torch.Tensor
) -> torch.Tensor:
    return linear(x, w, bias, tiling)


def _spread(
    seconds: Mapping[int, Mapping[str, float]], rows: Iterable[int]
) -> dict[int, Mapping[str, float]]:
    """`seconds`, and for each of `rows` that was not timed those of the next larger that was."""
    timed = sorted(seconds)
    spread = dict(seconds)
    for count in rows:
        above = next((t for t in timed if t >= count), None)
        if above is not None and _speaks_for(count, above):
            spread.setdefault(count, seconds[above])
    return spread


def _speaks_for(rows: int, timed: int) -> bool:
    """Whether a time at `timed` rows says which is fastest at `rows`."""
    return timed - rows <= max(8, rows // 4)
