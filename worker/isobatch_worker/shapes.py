"""Decides which operator shapes a command line names: `linear=4096x14336`, `attention=32/8x128`."""

import re
from dataclasses import dataclass

from isobatch_worker.errors import ShapeError

FORMS = {
    "linear": "linear=NxK or linear=NxK+bias, the weight's rows and columns",
    "norm": "norm=WIDTH, RMSNorm plain and after adding a residual",
    "activation": "activation=WIDTH, SiLU-and-mul of rows of twice WIDTH",
    "attention": "attention=HEADS/KV_HEADSxHEAD_SIZE",
}
"""Kind -> how its shape is written."""


@dataclass(frozen=True, slots=True)
class LinearOf:
    """A weight [n, k]."""

    n: int
    k: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class NormOf:
    """RMSNorm of rows of `width`."""

    width: int


@dataclass(frozen=True, slots=True)
class ActivationOf:
    """SiLU-and-mul that leaves rows of `width`."""

    width: int


@dataclass(frozen=True, slots=True)
class AttentionOf:
    """Causal attention of `heads` queries a token on `kv_heads` keys."""

    heads: int
    kv_heads: int
    size: int


Asked = LinearOf | NormOf | ActivationOf | AttentionOf

_NUMBER = r"([1-9][0-9]{0,6})"
_LINEAR = re.compile(rf"{_NUMBER}x{_NUMBER}(\+bias)?")
_WIDTH = re.compile(_NUMBER)
_ATTENTION = re.compile(rf"{_NUMBER}/{_NUMBER}x{_NUMBER}")


def parse_shape(text: str) -> Asked:
    """The shape that `text` names. Raises `ShapeError` with what was expected."""
    kind, _, written = text.partition("=")
    match kind:
        case "linear" if found := _LINEAR.fullmatch(written):
            return LinearOf(int(found[1]), int(found[2]), found[3] is not None)
        case "norm" if found := _WIDTH.fullmatch(written):
            return NormOf(int(found[1]))
        case "activation" if found := _WIDTH.fullmatch(written):
            return ActivationOf(int(found[1]))
        case "attention" if found := _ATTENTION.fullmatch(written):
            heads, kv_heads, size = (int(found[i]) for i in (1, 2, 3))
            if heads % kv_heads == 0:
                return AttentionOf(heads, kv_heads, size)
            raise ShapeError(f"{text!r}: {heads} heads are no multiple of {kv_heads} KV heads")
    expected = FORMS.get(kind) or "; ".join(FORMS.values())
    raise ShapeError(f"{text!r} names no shape: expected {expected}")
