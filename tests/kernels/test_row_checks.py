import pytest
import torch
from isobatch_kernels.bits import same_bits
from isobatch_kernels.row_checks import is_settled, settle_rows

WIDE = torch.arange(8 * 256.0).reshape(8, 256)


@pytest.mark.parametrize(
    ("x", "settled"),
    [
        pytest.param(WIDE, True, id="contiguous"),
        pytest.param(WIDE[3:4], True, id="one-row"),
        pytest.param(WIDE[:, 16:64], True, id="aligned-columns"),
        pytest.param(WIDE[:, 1:65], False, id="odd-address"),
        pytest.param(WIDE.reshape(-1)[: 7 * 264].reshape(7, 264)[:, :64], False, id="odd-stride"),
        pytest.param(WIDE.reshape(-1)[:721].reshape(7, 103), True, id="odd-width"),
        pytest.param(WIDE[:, :103], False, id="odd-width-of-aligned-rows"),
    ],
)
def test_rows_are_copied_only_where_alignment_is_not_that_of_the_width(
    x: torch.Tensor, settled: bool
) -> None:
    kept = settle_rows(x)

    assert is_settled(x) is settled
    assert (kept is x) is settled
    assert is_settled(kept)
    assert same_bits(kept, x)
