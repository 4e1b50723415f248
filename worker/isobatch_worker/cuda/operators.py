"""Performs: our kernels as operators of torch, which its compiler calls and does not look into.

torch.compile fuses and tunes what it sees; an operator registered here keeps the bits of its own
kernel, in a graph or out of it. None of them writes to its inputs.
"""

# ruff: noqa: ARG001  # a fake has the signature of its operator

import torch
from isobatch_kernels import rms_norm, rope, silu_and_mul
from isobatch_kernels.certification import CertificationRefused
from isobatch_kernels.linear_plan import LinearShape
from isobatch_kernels.matmul_schedules import CertifiedLinear
from vllm.utils.torch_utils import direct_register_custom_op

LinearKey = tuple[int, int, torch.dtype, bool]
"""(N, K, dtype, has a bias)."""


class Linears:
    """The certified linears of this process, by their weights' shape."""

    def __init__(self) -> None:
        """Nothing is certified yet."""
        self._certified: dict[LinearKey, CertifiedLinear] = {}

    def admit(self, shape: LinearShape, linear: CertifiedLinear) -> None:
        """Serve weights of `shape` by `linear` from now on."""
        self._certified[shape.n, shape.k, shape.dtype, shape.has_bias] = linear

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """X [..., K], weight [N, K] -> [..., N]; `CertificationRefused` for a shape not proved."""
        n, k = weight.shape
        linear = self._certified.get((n, k, weight.dtype, bias is not None))
        if linear is None:
            raise CertificationRefused(
                f"a linear of {n}x{k} {weight.dtype} runs that was not certified"
            )
        return linear(x.reshape(-1, k), weight, bias).view(*x.shape[:-1], n)


LINEARS = Linears()
"""torch's registry of operators is the process's, so what they dispatch to is too."""

_LIBRARY = torch.library.Library("isobatch", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's stub


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return LINEARS(x, weight, bias)


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm.rms_norm(x, weight, eps)


def _rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return rms_norm.add_rms_norm(x, residual, weight, eps)


def _add_rms_norm_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return silu_and_mul.silu_and_mul(x)


def _silu_and_mul_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _rope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    head_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = positions.shape[0]
    turned = rope.rope(
        positions,
        query.view(tokens, -1, head_size),
        key.view(tokens, -1, head_size),
        cos_sin,
    )
    return turned[0].view(query.shape), turned[1].view(key.shape)


def _rope_fake(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    head_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def register_operators() -> None:
    """Make `torch.ops.isobatch.*`. Idempotent: vLLM may load a plugin several times."""
    if hasattr(torch.ops.isobatch, "linear"):
        return
    for name, function, fake in (
        ("linear", _linear, _linear_fake),
        ("rms_norm", _rms_norm, _rms_norm_fake),
        ("add_rms_norm", _add_rms_norm, _add_rms_norm_fake),
        ("silu_and_mul", _silu_and_mul, _silu_and_mul_fake),
        ("rope", _rope, _rope_fake),
    ):
        direct_register_custom_op(name, function, fake_impl=fake, target_lib=_LIBRARY)
