from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from isobatch_kernels.attention_schedules import (
    WORKSPACE_BYTES,
    AttentionSchedule,
    Bounds,
    Chooser,
    chunks_of,
    partial_floats,
    schedules,
)
from isobatch_kernels.attention_tree import AttentionShape, AttentionTree, tree_of

LLAMA = AttentionShape(32, 8, 128, torch.bfloat16, scale=128**-0.5)
CHOOSER = Chooser(
    LLAMA, tree_of(LLAMA), schedules(LLAMA, tree_of(LLAMA), 64), 132, WORKSPACE_BYTES // 4, 2048
)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "chunk"),
    [
        (32, 8, 256),
        (16, 8, 256),
        (40, 8, 256),
        (32, 4, 256),
        (9, 3, 128),
        (32, 1, 512),
        (64, 64, 512),
    ],
)
def test_tree_is_the_committed_one_of_the_shape(heads: int, kv_heads: int, chunk: int) -> None:
    # A change here changes the bits that are served: it needs a new version in the tree's name.
    shape = AttentionShape(heads, kv_heads, 64, torch.bfloat16, scale=0.125)

    assert tree_of(shape) == AttentionTree(chunk, 64)
    assert tree_of(shape).name == f"chunks-{chunk}/tiles-64/ones-16/v1"


def test_tiles_of_large_heads_are_shorter() -> None:
    assert tree_of(replace(LLAMA, head_size=256)) == AttentionTree(256, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 9, "kv_heads": 2}, "9 heads are no multiple of 2"),
        ({"head_size": 100}, "head size 100"),
        ({"head_size": 264}, "head size 264"),
        ({"dtype": torch.float32}, "float32"),
        ({"scale": 0.0}, "need scale > 0"),
        ({"window": -1}, "window >= 0"),
    ],
)
def test_shape_that_no_kernel_takes_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, **change)  # type: ignore[arg-type]  # the table mixes field types


def test_chunk_of_part_of_a_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk 96 is not made of tiles of 64"):
        AttentionTree(96, 64)


def test_boxes_are_schedules_only_of_whole_blocks_and_power_of_two_heads() -> None:
    odd = replace(LLAMA, head_size=80)

    assert any(s.tma for s in schedules(LLAMA, tree_of(LLAMA), 64))
    assert not any(s.tma for s in schedules(LLAMA, tree_of(LLAMA), 16))
    assert not any(s.tma for s in schedules(odd, tree_of(odd), 64))


STEPS = [
    pytest.param(Bounds(1, 1, 1, 32_768), [(True, 16, 1, 1)], id="lone-long-decode"),
    pytest.param(Bounds(1, 1, 1, 200), [(False, 16, 1, 1)], id="decode-of-one-chunk"),
    pytest.param(Bounds(256, 256, 1, 32_768), [(False, 16, 1, 1)], id="many-decodes"),
    pytest.param(Bounds(1, 8192, 8192, 8192), [(False, 128, 1, 8192)], id="prefill"),
    pytest.param(Bounds(1, 300, 300, 300), [(False, 64, 1, 300)], id="short-prefill"),
    pytest.param(Bounds(1, 8, 8, 30_000), [(True, 16, 1, 8)], id="few-tokens-of-a-long-prompt"),
    pytest.param(
        Bounds(20, 2019, 2000, 4000), [(False, 128, 5, 2000), (True, 16, 1, 4)], id="mixed"
    ),
]


@pytest.mark.parametrize(("bounds", "wanted"), STEPS)
def test_launches_of_a_step(bounds: Bounds, wanted: list[tuple[bool, int, int, int]]) -> None:
    launches = CHOOSER.launches(bounds)

    found = [(x.schedule.split, x.schedule.rows, x.min_query, x.max_query) for x in launches]
    assert found == wanted


@st.composite
def steps(draw: st.DrawFn) -> Bounds:
    requests = draw(st.integers(1, 300))
    longest = draw(st.integers(1, 9000))
    tokens = draw(st.integers(longest + requests - 1, longest * requests))
    return Bounds(requests, tokens, longest, draw(st.integers(longest, 140_000)))


@given(steps(), st.integers(0, WORKSPACE_BYTES // 4))
def test_launches_cover_every_query_length_once_within_the_workspace(
    bounds: Bounds, floats: int
) -> None:
    launches = replace(CHOOSER, workspace_floats=floats).launches(bounds)

    covered = sorted((x.min_query, x.max_query) for x in launches)
    assert covered[0][0] == 1
    assert covered[-1][1] == bounds.max_query_len
    assert all(a[1] + 1 == b[0] for a, b in pairwise(covered))
    for x in launches:
        slots = bounds.requests * x.max_query
        if x.schedule.split:
            assert partial_floats(LLAMA, CHOOSER.tree, slots, bounds.max_seq_len) <= floats
            assert 1 <= x.splits <= chunks_of(CHOOSER.tree, bounds.max_seq_len)
        else:
            assert x.splits == 1


def test_reference_alone_serves_every_step() -> None:
    alone = replace(CHOOSER, admitted=(AttentionSchedule(16, 4, 3),))

    for bounds in (Bounds(1, 1, 1, 9999), Bounds(3, 900, 700, 900), Bounds(1, 8192, 8192, 8192)):
        assert {x.schedule for x in alone.launches(bounds)} == set(alone.admitted)
