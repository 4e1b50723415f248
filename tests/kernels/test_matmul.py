import pytest
import torch
from isobatch_kernels.certification import Proof
from isobatch_kernels.cublas import CUBLAS, CUBLASLT, library_linear, switched_to
from isobatch_kernels.matmul import REFERENCE, linear
from isobatch_kernels.matmul_schedules import BUCKETS, all_tilings, bucket_of, choose, tilings_for

X = torch.zeros(4, 32, dtype=torch.bfloat16)
W = torch.zeros(8, 32, dtype=torch.bfloat16)
NARROW = "tma-swap-t16-f16-k256-w2-s6"
WIDE = "tma-swap-t16-f64-k128-w4-s5"


@pytest.mark.parametrize(
    ("x", "w", "bias", "message"),
    [
        (X[0], W, None, r"got \[32\] and \[8, 32\]"),
        (X[:, :31], W, None, r"got \[4, 31\] and \[8, 32\]"),
        (X[:, :0], W[:, :0], None, r"N, K >= 1"),
        (X, W[:0], None, r"N, K >= 1"),
        (X.float(), W.float(), None, "float32"),
        (X, W.half(), None, "float16"),
        (X[:, ::2], W[:, ::2], None, "stride 2"),
        (X, W, torch.zeros(7).bfloat16(), r"need bias \[8\]"),
        (X, W, torch.zeros(8), "need bias"),
        (X, W, torch.zeros(16).bfloat16()[::2], r"stride \(2,\)"),
        (X, W.to("meta"), None, "different devices"),
        (X, W, None, "need a CUDA device"),
    ],
)
def test_what_a_linear_does_not_take_is_named_before_any_launch(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        linear(x, w, bias)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4, 40).bfloat16()[:, :32], "contiguous"),
        (torch.zeros(104).bfloat16()[8:].view(3, 32), "256"),
    ],
)
def test_the_library_refuses_operands_placed_as_no_proof_had_them(
    x: torch.Tensor, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch_kernels.cublas.check_linear", lambda *_: None)

    with pytest.raises(ValueError, match=message):
        library_linear(CUBLASLT, x, W)


def switches() -> tuple[object, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.backends.cuda.preferred_blas_library(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction_split_k,
    )


def test_the_librarys_switches_are_set_and_put_back_even_by_an_error() -> None:
    def fail_inside() -> None:
        with switched_to(CUBLASLT):
            assert switches()[1:] == (False, False, False, False)
            with switched_to(CUBLAS):
                assert switches()[1:] == (True, True, True, True)
            assert switches()[1:] == (False, False, False, False)
            raise KeyError

    before = switches()
    with pytest.raises(KeyError):
        fail_inside()

    assert switches() == before


def test_every_row_count_has_tilings_and_the_reference_among_them() -> None:
    for rows in (1, 16, 17, 100, 256, 511, 8192, 10**6):
        assert rows <= bucket_of(rows)
        assert tilings_for(rows)[-1] == REFERENCE
    names = [tiling.name for tiling in all_tilings()]
    assert len(names) == len(set(names))


def proof(**admitted: frozenset[int]) -> Proof:
    return Proof("linear", "8x32", "plain-k16", admitted, {}, 1)


def test_the_fastest_schedule_is_chosen_only_among_those_admitted_there() -> None:
    found = proof(**{NARROW: frozenset({1, 8}), WIDE: frozenset({1}), "cublas": frozenset({8})})
    seconds = {
        1: {NARROW: 2.0, WIDE: 1.0, "cublas": 0.5},
        8: {NARROW: 2.0, WIDE: 1.0, "cublas": 1.5},
    }

    choice = choose(found, seconds)

    assert choice.name_for(1) == WIDE
    assert choice.name_for(8) == "cublas"


def test_an_unproved_row_count_runs_a_tiling_admitted_all_over_its_bucket() -> None:
    found = proof(**{NARROW: frozenset({1, 8}), WIDE: frozenset({1}), "cublas": frozenset({1, 8})})
    seconds = {rows: {NARROW: 2.0, WIDE: 1.0, "cublas": 0.5} for rows in (1, 8)}

    choice = choose(found, seconds)

    assert choice.name_for(3) == NARROW
    assert {choice.name_for(end) for end in BUCKETS[1:]} == {REFERENCE.name}
