"""Decides which schedules of a linear are tried at a row count, and which of the admitted serves.

The choice is by time and never reaches the bits: every admitted schedule has the tree's.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from isobatch_kernels.certification import Proof, Schedule, Tensors
from isobatch_kernels.cublas import LIBRARIES, library_linear, placement_refusal
from isobatch_kernels.matmul import REFERENCE, Loads, Tiling, linear, tma_refusal

BUCKETS = (16, 32, 64, 128, 256, 512, 2**31)
"""Upper ends of the row counts that share a list of tilings and, between proofs, a choice."""

_LIBRARY_NAMES = frozenset(library.name for library in LIBRARIES)


def bucket_of(rows: int) -> int:
    """The bucket that `rows` >= 1 falls into, by its upper end."""
    return next(end for end in BUCKETS if rows <= end)


def _swapped(tokens: int, features: int, depth: int, warps: int, stages: int) -> Tiling:
    return Tiling(tokens, features, depth, warps, stages, swapped=True)


def _few(tokens: int) -> tuple[Tiling, ...]:
    """One tile of tokens, weights streamed: what matters is how much is in flight."""
    return (
        _swapped(tokens, 64, 128, 4, 5),
        _swapped(tokens, 64, 128, 4, 7),
        _swapped(tokens, 64, 256, 4, 3),
        _swapped(tokens, 128, 64, 4, 7),
        _swapped(tokens, 128, 128, 4, 4),
        Tiling(tokens, 64, 128, 4, 6, swapped=True, persistent=True),
        Tiling(tokens, 64, 128, 4, 4, Loads.POINTER, swapped=True),
    )


_NARROW = (_swapped(16, 16, 256, 2, 6), _swapped(16, 32, 256, 4, 4), _swapped(16, 32, 128, 2, 8))
"""For weights of few rows: tiles of 64 would leave most processors idle (`mma.sync`, not wgmma)."""

_MIDDLE = (
    _swapped(64, 64, 128, 4, 5),
    _swapped(64, 128, 128, 4, 4),
    _swapped(128, 64, 128, 4, 4),
    _swapped(128, 64, 64, 4, 7),
    _swapped(128, 128, 64, 8, 5),
    Tiling(128, 128, 64, 8, 5),
    Tiling(128, 128, 64, 4, 4),
    Tiling(128, 128, 64, 8, 4, Loads.POINTER),
)
_LARGE = (
    Tiling(128, 256, 64, 8, 4),
    Tiling(128, 256, 64, 8, 3, persistent=True),
    Tiling(256, 128, 64, 8, 4),
    _swapped(256, 128, 64, 8, 4),
    Tiling(256, 128, 64, 8, 3, swapped=True, persistent=True),
    Tiling(128, 128, 64, 8, 4, persistent=True),
    Tiling(128, 128, 64, 8, 4, Loads.POINTER),
)
_BY_BUCKET: Mapping[int, tuple[Tiling, ...]] = {
    16: _NARROW + _few(16),
    32: (_swapped(32, 32, 256, 4, 4), *_few(32)),
    64: _few(64),
    128: _MIDDLE,
    256: (*_MIDDLE, _swapped(256, 64, 64, 8, 5), _swapped(256, 128, 64, 8, 4)),
    512: _MIDDLE[3:] + _LARGE[:-1],
    BUCKETS[-1]: _LARGE,
}


def tilings_for(rows: int) -> tuple[Tiling, ...]:
    """The tilings worth trying for `rows` rows, the reference last."""
    return (*_BY_BUCKET[bucket_of(rows)], REFERENCE)


def all_tilings() -> tuple[Tiling, ...]:
    """Every tiling that may serve, each once."""
    return tuple(dict.fromkeys(t for end in BUCKETS for t in tilings_for(end)))


def serves(name: str, rows: int) -> bool:
    """Whether the schedule `name` is worth trying for `rows` rows."""
    return name in _LIBRARY_NAMES or any(name == tiling.name for tiling in tilings_for(rows))


def linear_schedules(w: torch.Tensor, bias: torch.Tensor | None) -> tuple[Schedule, ...]:
    """Every schedule of x -> x W^T (+ b) for this weight, the library's first."""
    libraries = [
        Schedule(library.name, _one_output(partial(library_linear, library, w=w, bias=bias)))
        for library in LIBRARIES
    ]
    tilings = [
        Schedule(tiling.name, _one_output(partial(linear, w=w, bias=bias, tiling=tiling)))
        for tiling in all_tilings()
    ]
    return (*libraries, *tilings)


def _one_output(run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Tensors]:
    return lambda x: (run(x),)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which schedule serves: `exact` row counts by name, others by the tiling of their bucket.

    The library stands in `exact` alone: at a row count that was not proved it may take another
    algorithm. A tiling's arithmetic does not depend on the row count.
    """

    exact: Mapping[int, str]
    spans: Mapping[int, Tiling]  # bucket -> tiling

    def name_for(self, rows: int) -> str:
        """The schedule for `rows` rows."""
        return self.exact.get(rows, self.spans[bucket_of(rows)].name)


def choose(proof: Proof, seconds: Mapping[int, Mapping[str, float]]) -> Choice:
    """The fastest admitted schedule per row count timed, and per bucket the fastest tiling.

    `seconds`: row count -> schedule name -> time of one call. A schedule that is not admitted at a
    row count is not chosen for it, however fast. A bucket that was not timed has the reference.
    """
    admitted: dict[int, set[str]] = {}
    for name, row_counts in proof.admitted.items():
        for rows in row_counts:
            admitted.setdefault(rows, set()).add(name)
    exact = {}
    for rows, times in seconds.items():
        candidates = admitted.get(rows, set()) & times.keys()
        if candidates:
            exact[rows] = min(candidates, key=lambda name: (times[name], name))
    return Choice(exact, {end: _span(end, admitted, seconds) for end in BUCKETS})


def _span(
    end: int, admitted: Mapping[int, set[str]], seconds: Mapping[int, Mapping[str, float]]
) -> Tiling:
    """The tiling that is admitted at every row count proved in the bucket, with the least time."""
    proved = [names for rows, names in admitted.items() if bucket_of(rows) == end]
    timed = [times for rows, times in seconds.items() if bucket_of(rows) == end]
    able = [
        tiling
        for tiling in tilings_for(end)
        if proved
        and timed
        and all(tiling.name in names for names in proved)
        and all(tiling.name in times for times in timed)
    ]
    return min(able, key=lambda t: _relative(t.name, timed), default=REFERENCE)


def _relative(name: str, timed: Iterable[Mapping[str, float]]) -> float:
    """Sum of times over the best at the same row count: no row count outweighs another."""
    return sum(times[name] / min(times.values()) for times in timed)


class CertifiedLinear:
    """A linear as it serves: any row count, by the chosen schedule, with the plain tree's bits."""

    def __init__(self, choice: Choice) -> None:
        """Serve by `choice`, which must come from proofs of this very shape and dtype."""
        self._choice = choice
        self.reference_only = False
        self._libraries = {library.name: library for library in LIBRARIES}
        self._tilings = {tiling.name: tiling for tiling in all_tilings()}

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """X [M, K], w [N, K], bias [N] -> [M, N]; raises ValueError as `matmul.linear` does."""
        rows = x.shape[0]
        if rows == 0 or self.reference_only:
            return linear(x, w, bias)
        library = self._libraries.get(self._choice.name_for(rows))
        if library is not None and not (placement_refusal("x", x) or placement_refusal("w", w)):
            return library_linear(library, x, w, bias)
        tiling = self._tilings.get(self._choice.name_for(rows), self._choice.spans[bucket_of(rows)])
        if tiling.loads is Loads.TMA and (tma_refusal("x", x) or tma_refusal("w", w)):
            tiling = REFERENCE
        return linear(x, w, bias, tiling)
