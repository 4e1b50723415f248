"""Performs the timing of schedules on a CUDA device: graph replays, interleaved, medians.

A call is timed inside of a CUDA graph, as it serves, over several weights in turn whose bytes
exceed the L2 cache, as they do in a model. The calls compared take turns, so that a clock or a
neighbour that moves meanwhile moves all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

Call = Callable[[torch.Tensor], object]
"""Takes one of the weights."""


@dataclass(frozen=True, slots=True)
class Times:
    """`seconds` of one call by name, and why the others could not be captured."""

    seconds: dict[str, float]
    failed: dict[str, str]


def time_calls(calls: Mapping[str, Call], weights: Sequence[torch.Tensor], rounds: int) -> Times:
    """Median over `rounds` replays of each call's graph, which runs it once for every weight.

    A call that raises is reported, and the others are timed all the same.
    """
    pool = torch.cuda.graph_pool_handle()
    graphs, failed = {}, {}
    for name, call in calls.items():
        try:
            graphs[name] = _captured(call, weights, pool)
        except (RuntimeError, ValueError) as exc:
            failed[name] = f"{type(exc).__name__}: {exc}"
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    replays: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            replays[name].append(_replay_seconds(graph) / len(weights))
    return Times({name: median(times) for name, times in replays.items()}, failed)


def _captured(call: Call, weights: Sequence[torch.Tensor], pool: Any) -> torch.cuda.CUDAGraph:
    call(weights[0])  # compiles and makes handles, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for weight in weights:
            call(weight)
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (_event() for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's stub


def rotated_weights(weight: torch.Tensor, least_bytes: int, most: int) -> list[torch.Tensor]:
    """`weight` and copies of it, 2 to `most`, together at least `least_bytes` where that allows."""
    size = weight.numel() * weight.element_size()
    count = min(most, max(2, -(-least_bytes // size)))
    return [weight, *(weight.clone() for _ in range(count - 1))]
