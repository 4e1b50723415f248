"""Run by tests/kernels/test_matmul.py in a process of its own, with TRITON_INTERPRET=1."""

from dataclasses import replace

import pytest
import torch
from isobatch_kernels.bits import same_bits
from isobatch_kernels.certification import CertificationRefused, Schedule, Tensors, certify
from isobatch_kernels.inputs import mixed_rows
from isobatch_kernels.matmul import REFERENCE, Loads, Tiling, linear
from isobatch_kernels.matmul_operator import Linear, linear_operator, probe_rows, prove_each
from isobatch_kernels.matmul_schedules import CertifiedLinear, all_tilings, choose
from isobatch_kernels.reveal import Setting, reveal
from isobatch_kernels.tree import Tree, plain_tree

from tests.kernels.interpreted import mma_model

mma_model.install()

CPU = torch.device("cpu")
M, N, K = 19, 70, 136  # nothing divides a tile, and 136 rows of two bytes are aligned for TMA
PLAIN = plain_tree(K, 16)
SMALL = Tiling(16, 32, 64, warps=1, stages=1, loads=Loads.POINTER)
SMALL_SWAPPED = Tiling(16, 32, 32, warps=1, stages=1, swapped=True, persistent=True)


def drawn(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return mixed_rows(rows, columns, dtype, torch.Generator().manual_seed(seed))


X, W = drawn(M, K, 1), drawn(N, K, 2)
EXPECTED = mma_model.linear_in(PLAIN, X, W)


@pytest.mark.parametrize("tiling", all_tilings(), ids=lambda t: t.name)
def test_every_shipped_tiling_adds_in_the_plain_tree_and_writes_its_output_alone(
    tiling: Tiling,
) -> None:
    around = torch.full((M + 2, N + 6), float("nan"), dtype=torch.bfloat16)

    linear(X, W, tiling=tiling, out=around[1 : M + 1, 3 : N + 3])

    assert same_bits(around[1 : M + 1, 3 : N + 3], EXPECTED)
    around[1 : M + 1, 3 : N + 3] = float("nan")
    assert around.isnan().all()


@pytest.mark.parametrize("tiling", [SMALL, SMALL_SWAPPED], ids=lambda t: t.name)
def test_rows_may_be_strided_in_every_operand(tiling: Tiling) -> None:
    x = torch.full((M, K + 24), float("nan"), dtype=torch.bfloat16)
    w = torch.full((N, K + 8), float("nan"), dtype=torch.bfloat16)
    x[:, 8 : K + 8], w[:, :K] = X, W

    assert same_bits(linear(x[:, 8 : K + 8], w[:, :K], tiling=tiling), EXPECTED)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (17, 33, 65), (2, 40, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_reference_takes_any_shape(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, n, k = shape
    x, w = drawn(rows, k, 3, dtype), drawn(n, k, 4, dtype)

    assert same_bits(linear(x, w), mma_model.linear_in(plain_tree(k, 16), x, w))


@pytest.mark.parametrize("tiling", [SMALL, SMALL_SWAPPED], ids=lambda t: t.name)
def test_the_bias_is_added_before_the_one_rounding(tiling: Tiling) -> None:
    x, w = torch.randn(M, K).half(), torch.randn(N, K).half()
    bias = torch.randn(N).half()
    exact = x.double() @ w.double().T + bias.double()

    y = linear(x, w, bias, tiling)

    # Half an ulp of float16, and float32's truncations: a second rounding would need twice that.
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-11 * 1.02 + 1e-4).all()
    assert same_bits(y, linear(x, w, bias, REFERENCE))


@pytest.mark.parametrize("tiling", [SMALL, SMALL_SWAPPED], ids=lambda t: t.name)
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (7, 8), (18, 19), (2, 18), (5, 19)])
def test_a_rows_bits_do_not_depend_on_its_batch(tiling: Tiling, start: int, stop: int) -> None:
    assert same_bits(linear(X[start:stop], W, tiling=tiling), EXPECTED[start:stop])


def test_no_rows_give_no_rows() -> None:
    assert linear(X[:0], W).shape == (0, N)


def test_tma_refuses_what_it_cannot_read_by_name() -> None:
    x = torch.zeros(4, 20, dtype=torch.bfloat16)
    for bad, message in ((x, "40 bytes apart"), (torch.zeros(4, 24).bfloat16()[:, 1:], "address")):
        with pytest.raises(ValueError, match=message):
            linear(bad, bad, tiling=SMALL_SWAPPED)


def test_revealing_the_reference_confirms_the_plain_tree_and_no_other() -> None:
    setting = Setting(rows=2, n=40, dtype=torch.bfloat16, device=CPU)

    assert reveal(linear, plain_tree(200, 16), setting) is None
    assert reveal(linear, Tree(200, 16, 64), setting) is not None
    assert reveal(linear, plain_tree(200, 32), setting) is not None


def planted(name: str, tree_for: dict[bool, Tree]) -> Schedule:
    """Adds in `tree_for[rows > 16]`."""

    def run(x: torch.Tensor) -> Tensors:
        return (mma_model.linear_in(tree_for[x.shape[0] > 16], x, WEIGHT),)

    return Schedule(name, run)


WEIGHT = probe_rows(48, 96, torch.bfloat16, CPU, seed=5)
TREE = plain_tree(96, 16)
SPLIT = Tree(96, 16, 48)
OPERATOR = linear_operator(Linear(WEIGHT, None, TREE, max_rows=24), seed=6, rows=(1, 8, 16, 17, 24))


def test_a_split_without_its_tree_and_a_tile_chosen_by_rows_are_refused() -> None:
    candidates = (
        planted("split", {False: SPLIT, True: SPLIT}),
        planted("depth-by-rows", {False: SPLIT, True: TREE}),
        Schedule(SMALL.name, lambda x: (linear(x, WEIGHT, tiling=SMALL),)),
        Schedule("raises", lambda x: (linear(x, WEIGHT[:, :95]),)),
    )

    proof = prove_each(replace(OPERATOR, candidates=candidates), lambda *_: True)

    assert proof.admitted == {
        "split": frozenset(),
        "depth-by-rows": frozenset({17, 24}),
        SMALL.name: frozenset({1, 8, 16, 17, 24}),
        "raises": frozenset(),
    }
    assert "differs first at" in proof.refused["split"]
    assert proof.refused["depth-by-rows"].startswith("1 rows from")
    assert "raised ValueError" in proof.refused["raises"]


def test_a_reference_of_another_tree_or_of_one_tree_per_row_count_proves_nothing() -> None:
    linear_ = Linear(WEIGHT, None, TREE, max_rows=8)

    def split(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return mma_model.linear_in(SPLIT, x, w)

    def by_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return mma_model.linear_in(TREE if x.shape[0] < 50 else SPLIT, x, w)

    with pytest.raises(CertificationRefused, match="adds in another tree"):
        certify(linear_operator(linear_, seed=6, rows=(8,), reference=split))
    with pytest.raises(CertificationRefused, match="bits move with its place"):
        certify(linear_operator(linear_, seed=6, rows=(8,), reference=by_rows))


def test_a_certified_linear_keeps_the_bits_whatever_was_chosen() -> None:
    proof = replace(
        certify(replace(OPERATOR, candidates=())), admitted={"cublas": frozenset({8}), **ADMITTED}
    )
    choice = choose(proof, {8: {"cublas": 1.0, ODD: 2.0}, 24: {EVEN: 1.0}})
    serve = CertifiedLinear(choice)
    x = drawn(33, 96, 7)
    whole = linear(x, WEIGHT)

    assert choice.name_for(8) == "cublas"
    for rows in (0, 1, 5, 17, 24, 33):
        assert same_bits(serve(x[:rows], WEIGHT), whole[:rows])
    odd = torch.zeros(33, 99, dtype=torch.bfloat16)[:, 1:97].copy_(x)
    assert same_bits(serve(odd, WEIGHT), whole)


ODD, EVEN = "tma-swap-t16-f32-k128-w2-s8", "tma-swap-t32-f32-k256-w4-s4"
ADMITTED = {ODD: frozenset({8}), EVEN: frozenset({24})}
