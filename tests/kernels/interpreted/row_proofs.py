"""Certification of the row kernels in the interpreter: it admits ours, and a rival by its bits."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from isobatch_kernels import row_proofs, rows
from isobatch_kernels.certification import Proof, Tensors, certify
from isobatch_kernels.row_proofs import RowShapes, row_operators
from isobatch_kernels.rows import RowFunction
from isobatch_kernels.silu_and_mul import silu_and_mul

import tests.kernels.interpreter  # noqa: F401  # mends the interpreter

SHAPES = RowShapes(40, 24, 2, 8, 50, torch.bfloat16, max_rows=3)
NAMES = ["rms_norm", "add_rms_norm", "silu_and_mul", "rope", "log_softmax"]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 rows and 8 rows a count: the interpreter takes milliseconds a row."""
    monkeypatch.setattr(rows, "ROWS_PROVED_EACH", 8)
    monkeypatch.setattr(row_proofs, "RowOperator", partial(rows.RowOperator, block_rows=8))


def prove(name: str, others: dict[str, RowFunction] | None = None) -> Proof:
    operators = row_operators(SHAPES, torch.device("cpu"), others or {}, seed=0)
    return certify(next(o for o in operators if o.name == name))


@pytest.mark.parametrize("name", NAMES)
def test_row_kernel_is_admitted_at_every_row_count(name: str) -> None:
    proof = prove(name)

    assert proof.admitted["direct"] == {1, 2, 3}
    assert proof.refused == {}


def _batch_dependent(x: torch.Tensor) -> Tensors:
    return (silu_and_mul(x if x.shape[0] < 3 else x * 1.01),)


RIVALS: list[object] = [
    pytest.param(lambda x: (silu_and_mul(x),), {1, 2, 3}, id="same-bits"),
    pytest.param(_batch_dependent, {1, 2}, id="other-bits-at-three-rows"),
]


@pytest.mark.parametrize(("rival", "counts"), RIVALS)
def test_rival_is_admitted_where_it_has_the_bits(
    rival: Callable[..., Tensors], counts: set[int]
) -> None:
    assert prove("silu_and_mul", {"silu_and_mul": rival}).admitted["other"] == counts


def test_rival_of_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no row kernels named"):
        row_operators(SHAPES, torch.device("cpu"), {"softmax": _batch_dependent}, seed=0)
