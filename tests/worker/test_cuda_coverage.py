"""What a card's worker certifies of a model, and what it refuses to serve. Needs no card."""

from collections.abc import Iterator

import pytest
import torch
from isobatch_kernels.certification import CertificationRefused
from isobatch_kernels.linear_plan import LinearShape
from isobatch_operator.local.ports import free_port
from isobatch_worker.cuda.coverage import cover
from isobatch_worker.cuda.layers import (
    StrictRMSNorm,
    StrictRotaryEmbedding,
    StrictSiluAndMul,
)
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

TOKENS, REQUESTS = 2048, 64


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """vLLM's parallel layers ask which of how many ranks they are on."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"tcp://127.0.0.1:{free_port('127.0.0.1')}",
            backend="gloo",
        )
        ensure_model_parallel_initialized(1, 1)
        yield
    cleanup_dist_env_and_memory()


class Model(nn.Module):
    """A model of `layers`, with a head of its own or one that is its embedding."""

    def __init__(self, *layers: nn.Module, is_tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(128, 32)
        self.layers = nn.ModuleList(layers)
        self.lm_head = self.embed_tokens if is_tied else ParallelLMHead(128, 32)


def linear(n: int, k: int, *, bias: bool = False) -> ReplicatedLinear:
    return ReplicatedLinear(k, n, bias=bias, params_dtype=torch.bfloat16)


def test_every_shape_is_found_once_with_the_most_rows_that_it_is_given() -> None:
    model = Model(linear(48, 32), linear(48, 32), linear(48, 32, bias=True), linear(128, 32))

    found = cover(model, TOKENS, REQUESTS)

    floats = [shape for shape in found.linears.values() if shape.dtype == torch.float32]
    assert floats == [LinearShape(128, 32, torch.float32, has_bias=False, max_rows=REQUESTS)]
    assert {(s.n, s.k, s.has_bias, s.max_rows) for s in found.linears.values()} == {
        (48, 32, False, TOKENS),
        (48, 32, True, TOKENS),
        (128, 32, False, TOKENS),
        (128, 32, False, REQUESTS),
    }


def test_an_embedding_is_a_linear_only_where_it_is_the_head_too() -> None:
    found = cover(Model(linear(48, 32), is_tied=True), TOKENS, REQUESTS)

    assert {(s.n, s.max_rows) for s in found.linears.values()} == {(48, TOKENS), (128, REQUESTS)}


def test_layers_of_ours_are_found_by_what_their_kernels_need() -> None:
    rotary = StrictRotaryEmbedding(16, 16, 64, 10_000.0, True, torch.bfloat16)
    model = Model(StrictRMSNorm(32), StrictRMSNorm(16), StrictSiluAndMul(), rotary)

    found = cover(model, TOKENS, REQUESTS)

    assert found.norms == {16, 32}
    assert found.has_activation
    assert found.rotaries == [rotary]


REFUSED = [
    pytest.param(lambda: nn.Linear(4, 4), "torch.nn.modules.linear.Linear", id="unknown"),
    pytest.param(lambda: GateLinear(32, 8), "GateLinear", id="linear-of-its-own-kernels"),
    pytest.param(lambda: RMSNorm(32), "layernorm.RMSNorm", id="layer-that-is-not-ours"),
    pytest.param(
        lambda: StrictRMSNorm(32, var_hidden_size=16), "a variance over part", id="variance"
    ),
    pytest.param(
        lambda: StrictRotaryEmbedding(16, 16, 64, 10_000.0, False, torch.bfloat16),
        "GPT-J style",
        id="rotary",
    ),
]


@pytest.mark.parametrize(("build", "named"), REFUSED)
def test_a_layer_that_nobody_certifies_is_refused_by_name(build: object, named: str) -> None:
    assert callable(build)
    with pytest.raises(CertificationRefused, match=named):
        cover(Model(build()), TOKENS, REQUESTS)
