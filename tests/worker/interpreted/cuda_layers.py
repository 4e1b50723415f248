"""vLLM's layers on our operators, in Triton's interpreter: what a model on a card is built of."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from isobatch_kernels.attention_schedules import REFERENCE as ATTENTION_REFERENCE
from isobatch_kernels.attention_tree import AttentionShape
from isobatch_kernels.bits import same_bits
from isobatch_kernels.certification import CertificationRefused
from isobatch_kernels.linear_plan import LinearShape
from isobatch_kernels.matmul import REFERENCE, linear
from isobatch_kernels.matmul_schedules import BUCKETS, CertifiedLinear, Choice
from isobatch_kernels.paged_attention import (
    AttentionLauncher,
    allocate_workspace,
    attention_reference,
)
from isobatch_worker.cuda.attention import BLOCK_SIZE, StrictAttention, StrictAttentionBackend
from isobatch_worker.cuda.layers import (
    StrictRMSNorm,
    StrictRotaryEmbedding,
    StrictSiluAndMul,
    register_layers,
)
from isobatch_worker.cuda.operators import LINEARS, register_operators
from isobatch_worker.cuda.prepare import _linear
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope

import tests.kernels.interpreter  # noqa: F401  # mends the interpreter

WIDTH = 96
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32


@pytest.fixture(scope="module", autouse=True)
def strict_layers() -> Iterator[None]:
    register_operators()
    register_layers()
    with set_current_vllm_config(VllmConfig()):
        yield


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0.02, atol=0.02)


def test_vllm_builds_our_norm_which_is_its_own_but_for_a_rounding() -> None:
    norm = RMSNorm(WIDTH, eps=1e-5).bfloat16()
    norm.weight.data.copy_(draw(WIDTH, seed=1))
    x, residual = draw(5, WIDTH), draw(5, WIDTH, seed=2)

    assert type(norm) is StrictRMSNorm
    close(norm(x), norm.forward_native(x.clone()))
    got, wanted = norm(x, residual), norm.forward_native(x.clone(), residual.clone())
    close(got[0], wanted[0])
    assert same_bits(got[1], wanted[1])
    assert same_bits(norm(x[3:4], residual[3:4])[0], got[0][3:4])


def test_vllm_builds_our_activation() -> None:
    activation, x = SiluAndMul(), draw(5, 2 * WIDTH)

    assert type(activation) is StrictSiluAndMul
    close(activation(x), activation.forward_native(x))
    assert same_bits(activation(x[1:2]), activation(x)[1:2])


def test_vllm_builds_our_rotary_embedding() -> None:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    rotary = get_rope(HEAD_SIZE, 128, rope_parameters=parameters, dtype=torch.bfloat16)
    positions = torch.tensor([0, 7, 100, 7])
    query, key = draw(4, HEADS * HEAD_SIZE), draw(4, KV_HEADS * HEAD_SIZE, seed=1)

    assert type(rotary) is StrictRotaryEmbedding
    turned = rotary(positions, query.clone(), key.clone())
    wanted = rotary.forward_native(positions, query.clone(), key.clone())
    for got, native, before in zip(turned, wanted, (query, key), strict=True):
        assert got.shape == before.shape
        close(got, native)
    alone = rotary(positions[2:3], query[2:3].clone(), key[2:3].clone())
    assert same_bits(alone[0], turned[0][2:3])


def test_a_linear_serves_once_it_is_certified_and_keeps_leading_dimensions() -> None:
    weight, bias, x = draw(48, WIDTH), draw(48, seed=1), draw(2, 3, WIDTH, seed=2)
    with pytest.raises(CertificationRefused, match="48x96"):
        _linear(nn.Module(), x, weight, bias)

    shape = LinearShape(48, WIDTH, torch.bfloat16, has_bias=True, max_rows=8)
    LINEARS.admit(shape, CertifiedLinear(Choice({}, dict.fromkeys(BUCKETS, REFERENCE))))

    got = _linear(nn.Module(), x, weight, bias)
    assert same_bits(got.view(6, 48), linear(x.view(6, WIDTH), weight, bias))
    with pytest.raises(CertificationRefused, match="48x96"):
        _linear(nn.Module(), x, weight)  # without its bias it is another operator


def attention() -> StrictAttention:
    return StrictAttentionBackend.get_impl_cls()(
        HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, None, None, "auto"
    )


def launcher_of(shape: AttentionShape) -> AttentionLauncher:
    workspace = allocate_workspace(shape, 2, 2 * BLOCK_SIZE, torch.device("cpu"))
    return AttentionLauncher(shape, (ATTENTION_REFERENCE,), workspace, 4, BLOCK_SIZE)


def metadata(lengths: list[tuple[int, int]]) -> SimpleNamespace:
    """Of requests of (query tokens, sequence length), one block each, in block order 1, 0."""
    starts = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).int()
    return SimpleNamespace(
        num_actual_tokens=int(starts[-1]),
        block_table=torch.tensor([[1], [0]], dtype=torch.int32)[: len(lengths)],
        query_start_loc=starts,
        seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
        max_query_len=max(queries for queries, _ in lengths),
        max_seq_len=max(length for _, length in lengths),
    )


def attend(impl: StrictAttention, query: torch.Tensor, batch: SimpleNamespace) -> torch.Tensor:
    """Over the cache as vLLM lays it out, the padding of a captured graph behind the tokens."""
    padded = torch.cat((query, torch.full_like(query[:1], torch.nan)))
    cache = draw(2, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, seed=9)
    nothing = torch.empty(0)
    out = torch.zeros_like(padded)
    impl.forward(nn.Module(), padded, nothing, nothing, cache, batch, out)
    assert not out[-1].any()
    return out[:-1]


def test_attention_reads_vllm_s_cache_and_a_decode_has_the_bits_of_its_prefill() -> None:
    impl, query = attention(), draw(40 + 3, HEADS, HEAD_SIZE)
    impl.launcher = launcher_of(impl.shape(torch.bfloat16))

    together = attend(impl, query, metadata([(40, 40), (3, 17)]))
    alone = attend(impl, query[39:40], metadata([(1, 40)]))

    assert same_bits(alone, together[39:40])
    batches: list[object] = []
    impl.launcher = batches.append  # type: ignore[assignment]
    attend(impl, query, metadata([(40, 40), (3, 17)]))
    [batch] = batches
    close(together, attention_reference(impl.shape(torch.bfloat16), batch))  # type: ignore[arg-type]


def test_attention_that_nobody_certified_does_not_run() -> None:
    with pytest.raises(CertificationRefused, match="not certified"):
        attend(attention(), draw(3, HEADS, HEAD_SIZE), metadata([(3, 3)]))
