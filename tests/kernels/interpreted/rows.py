"""Row kernels in Triton's interpreter: their numbers, their bits, and what they refuse."""

from collections.abc import Callable

import pytest
import torch
from isobatch_kernels.bits import same_bits
from isobatch_kernels.log_softmax import log_softmax, log_softmax_reference
from isobatch_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from isobatch_kernels.rope import rope, rope_reference
from isobatch_kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

import tests.kernels.interpreter  # noqa: F401  # mends the interpreter

Rows = Callable[[torch.Tensor], torch.Tensor]


def weight(columns: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, columns)


def draw(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of a wider tensor whose other columns are NaN."""
    wide = torch.full((rows, columns + 24), torch.nan, dtype=dtype)
    wide[:, :columns] = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return wide[:, :columns]


OPERATORS = [
    pytest.param(lambda x: rms_norm(x, weight(x.shape[1]), 1e-6), id="rms-norm"),
    pytest.param(lambda x: add_rms_norm(x, x * 0.5, weight(x.shape[1]), 1e-6)[0], id="add-norm"),
    pytest.param(silu_and_mul, id="silu-and-mul"),
    pytest.param(log_softmax, id="log-softmax"),
]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("columns", [2, 96, 1030, 4100])
def test_bits_of_a_row_do_not_depend_on_its_batch(operator: Rows, columns: int) -> None:
    x = draw(9, columns)
    together = operator(x)

    assert not together.isnan().any()
    assert same_bits(operator(x[4:5]), together[4:5])
    assert same_bits(operator(x.flip(0)), together.flip(0))


@pytest.mark.parametrize("columns", [1, 96, 1030])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rms_norm_is_its_reference_but_for_a_rounding(columns: int, dtype: torch.dtype) -> None:
    x = draw(3, columns, dtype)

    got = rms_norm(x, weight(columns), 1e-6)

    wanted = rms_norm_reference(x, weight(columns), 1e-6)
    torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_add_rms_norm_has_the_bits_of_an_addition_then_a_norm() -> None:
    x, residual = draw(3, 1030), draw(4, 1030)[:3].contiguous()
    total = x + residual

    normed, kept = add_rms_norm(x, residual, weight(1030), 1e-6)

    assert same_bits(kept, total)
    assert same_bits(normed, rms_norm(total, weight(1030), 1e-6))


@pytest.mark.parametrize("width", [1, 48, 1030])
def test_silu_and_mul_is_its_reference_but_for_a_rounding(width: int) -> None:
    x = draw(3, 2 * width)

    torch.testing.assert_close(silu_and_mul(x), silu_and_mul_reference(x), rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("columns", [1, 100, 4096, 9000])
def test_log_softmax_is_its_reference_but_for_a_rounding(columns: int) -> None:
    x = draw(2, columns, torch.float32) * 10

    torch.testing.assert_close(log_softmax(x), log_softmax_reference(x), rtol=1e-5, atol=1e-5)


def test_log_softmax_of_masked_logits_is_finite_where_a_logit_is() -> None:
    x = torch.full((2, 5000), -torch.inf)
    x[0, 4999], x[1, 0] = 3.0, 2.0

    got = log_softmax(x)

    assert got[0, 4999] == 0
    assert got[1, 0] == 0
    assert got[0, :4999].isneginf().all()


@pytest.mark.parametrize("width", [2, 8, 12])
def test_rope_turns_heads_of_a_fused_projection_by_its_reference(width: int) -> None:
    fused = torch.randn(5, 12, 12, generator=torch.Generator().manual_seed(1)).bfloat16()
    query, key = fused[:, :9], fused[:, 9:11]
    table = torch.randn(40, width, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([0, 39, 7, 7, 3])

    turned = rope(positions, query, key, table)

    for got, x in zip(turned, (query, key), strict=True):
        assert got.is_contiguous()
        assert same_bits(got, rope_reference(positions, x, table))


def test_rms_norm_of_strided_heads_has_the_bits_of_their_copies() -> None:
    fused = torch.randn(5, 12, 96, generator=torch.Generator().manual_seed(1)).bfloat16()

    got = rms_norm(fused[:, 2:9], weight(96), 1e-6)

    assert same_bits(got.view(-1, 96), rms_norm(fused[:, 2:9].reshape(-1, 96), weight(96), 1e-6))


BAD: list[object] = [
    pytest.param(lambda x: rms_norm(x.T, weight(4), 1e-6), "contiguous columns", id="stride"),
    pytest.param(lambda x: rms_norm(x, weight(9), 1e-6), "weight is", id="weight"),
    pytest.param(lambda x: rms_norm(x.int(), weight(8), 1e-6), "torch.int32", id="dtype"),
    pytest.param(lambda x: add_rms_norm(x, x[:2], weight(8), 1e-6), "residual", id="residual"),
    pytest.param(lambda x: add_rms_norm(x, x.half(), weight(8), 1e-6), "tensor 1", id="two-dtypes"),
    pytest.param(lambda x: silu_and_mul(x[:, :7]), "two halves", id="odd"),
    pytest.param(lambda x: log_softmax(x[0]), r"not \[T, D\]", id="one-dimension"),
    pytest.param(lambda x: log_softmax(x[:, :0]), r"not \[T, D\]", id="no-column"),
    pytest.param(
        lambda x: rope(torch.arange(3), x[:, None], x[:, None], x), "positions", id="tokens"
    ),
    pytest.param(
        lambda x: rope(torch.arange(4).int(), x[:, None], x[:, None], x), "int64", id="index"
    ),
    pytest.param(
        lambda x: rope(torch.arange(4), x[:, None, :4], x[:, None, :4], x), "cos_sin", id="table"
    ),
    pytest.param(
        lambda x: rope(torch.arange(4), x[:, None], x[:, None, :4], x), "beside 4", id="heads"
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_refused_by_name(call: Callable[[torch.Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(4, 8))


def test_no_rows_give_no_rows() -> None:
    empty = torch.empty(0, 8)

    assert rms_norm(empty, weight(8), 1e-6).shape == (0, 8)
    assert silu_and_mul(empty).shape == (0, 4)
    assert log_softmax(empty).shape == (0, 8)
