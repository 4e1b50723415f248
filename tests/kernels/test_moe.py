import pytest
import torch
from isobatch_kernels.matmul import Loads, Tiling
from isobatch_kernels.moe import Routing, combine, group_slots, grouped_linear, route
from isobatch_kernels.moe_operator import draw_ids

TILING = Tiling(16, 64, 64, warps=4, stages=3, loads=Loads.POINTER)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "crowd"),
    [
        (1, 8, 2, 8),
        (5, 8, 2, 2),
        (33, 128, 8, 128),
        (64, 128, 8, 9),
        (40, 3, 3, 3),
    ],
)
@pytest.mark.parametrize("size", [16, 64])
def test_tiles_cover_every_slot_once_and_hold_one_expert_each(
    tokens: int, experts: int, top_k: int, crowd: int, size: int
) -> None:
    ids = draw_ids(tokens, experts, top_k, crowd, seed=1)
    grouping = group_slots(ids, experts, size)

    seen: list[int] = []
    for expert, start, stop in zip(
        grouping.expert.tolist(), grouping.start.tolist(), grouping.stop.tolist(), strict=True
    ):
        slots = grouping.order[start : max(start, stop)].tolist()
        assert len(slots) <= size
        assert all(int(ids.view(-1)[slot]) == expert for slot in slots)
        seen += slots
    assert sorted(seen) == list(range(tokens * top_k))


def test_a_slot_of_no_expert_is_in_no_tile() -> None:
    grouping = group_slots(torch.tensor([[-1, 0], [4, 3]], dtype=torch.int32), 4, 16)
    covered = [
        slot
        for start, stop in zip(grouping.start.tolist(), grouping.stop.tolist(), strict=True)
        for slot in grouping.order[start : max(start, stop)].tolist()
    ]

    assert sorted(covered) == [1, 3]


X = torch.zeros(6, 32, dtype=torch.bfloat16)
W = torch.zeros(4, 8, 32, dtype=torch.bfloat16)
IDS = torch.zeros(6, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("x", "w", "size", "slots_per_row", "message"),
    [
        (X, W[0], 16, 2, r"w \[E, N, K\]"),
        (X[:, :16], W, 16, 2, r"got \[6, 16\] and \[8, 32\]"),
        (X, W, 16, 1, "12 slots are not 1 for each of 6 rows"),
        (X, W, 32, 2, "grouped by 32, the tiling takes 16"),
        (X, W, 16, 2, "need a CUDA device"),
    ],
)
def test_what_a_grouped_linear_does_not_take_is_named_before_any_launch(
    x: torch.Tensor,
    w: torch.Tensor,
    size: int,
    slots_per_row: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "CUDA" not in message:
        monkeypatch.setattr("isobatch_kernels.matmul.check_device", lambda *_: None)

    with pytest.raises(ValueError, match=message):
        grouped_linear(x, w, group_slots(IDS, 4, size), slots_per_row, TILING)


@pytest.mark.parametrize(
    "call",
    [
        lambda: route(torch.zeros(2, 4), Routing(5)),
        lambda: route(torch.zeros(2, 4), Routing(0)),
        lambda: route(torch.zeros(4, 2).T, Routing(2)),
        lambda: combine(torch.zeros(5, 8), torch.zeros(2, 2)),
        lambda: combine(torch.zeros(4, 8), torch.zeros(2, 2).double()),
    ],
)
def test_bad_scores_and_bad_weights_are_refused(call: object) -> None:
    with pytest.raises(ValueError, match="need"):
        call()  # type: ignore[operator]  # a table of calls
