"""Decides what of vLLM's resolved configuration a certified engine may have. Pure.

Flags have aliases, dotted forms and files; what they came to has one spelling. So the arguments
are refused early where they are recognized, and the configuration is what is believed.
"""

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], object]
"""Configuration -> the setting, falsy where it is as certified."""


def _unless(allowed: frozenset[object], read: Check) -> Check:
    def check(config: Any) -> object:
        value = read(config)
        plain = getattr(value, "name", value)
        return None if plain in allowed else repr(plain)

    return check


Checks = Mapping[str, tuple[Check, str]]
"""Name of a setting -> how it is read, and why another value is refused."""

_ON_BOTH: Checks = {
    "speculative decoding": (
        lambda c: c.speculative_config,
        "drafts make the batch's shape part of the arithmetic",
    ),
    "LoRA": (lambda c: c.lora_config, "LoRA linears are not certified"),
    "quantization": (
        lambda c: c.quant_config or c.model_config.quantization,
        "quantized linears are not certified",
    ),
    "KV cache dtype": (
        _unless(frozenset({"auto", "bfloat16", "float16"}), lambda c: c.cache_config.cache_dtype),
        "a quantized KV cache is not certified",
    ),
    "KV scales": (
        lambda c: c.cache_config.calculate_kv_scales,
        "scales follow what was served first",
    ),
    "KV sharing": (
        lambda c: c.cache_config.kv_sharing_fast_prefill,
        "it skips layers of a prefill",
    ),
    "KV transfer": (lambda c: c.kv_transfer_config, "keys of another process are not certified"),
    "encoder transfer": (lambda c: c.ec_transfer_config, "embeddings of another process"),
    "several ranks": (
        lambda c: (
            max(
                c.parallel_config.world_size,
                c.parallel_config.data_parallel_size,
                c.parallel_config.decode_context_parallel_size,
                c.parallel_config.prefill_context_parallel_size,
            )
            > 1
        ),
        "reductions over ranks are not certified",
    ),
    "micro-batches": (
        lambda c: c.parallel_config.enable_dbo or c.parallel_config.ubatch_size,
        "a batch cut in two is not certified",
    ),
    "worker extension": (
        lambda c: c.parallel_config.worker_extension_cls,
        "another worker has other seams",
    ),
    "scheduler class": (
        lambda c: isinstance(c.scheduler_config.scheduler_cls, str),
        "another scheduler has other seams",
    ),
    "logprobs mode": (
        _unless(frozenset({"raw_logprobs"}), lambda c: c.model_config.logprobs_mode),
        "only raw_logprobs are certified",
    ),
    "max logprobs": (
        lambda c: c.model_config.max_logprobs == -1,
        "logprobs of the whole vocabulary change the form of a neighbour's",
    ),
    "logits processors": (
        lambda c: c.model_config.logits_processors,
        "foreign logits processors are not certified",
    ),
    "attention dtype": (
        lambda c: c.model_config.override_attention_dtype,
        "the attention kernel is chosen by certification",
    ),
    "pooling": (
        _unless(frozenset({"generate"}), lambda c: c.model_config.runner_type),
        "only generation is certified",
    ),
    "multimodal input": (
        lambda c: c.model_config.is_multimodal_model,
        "towers for other media are not certified",
    ),
    "weight transfer": (
        lambda c: c.weight_transfer_config,
        "weights must stay those that were certified",
    ),
}


ON_CPU: Checks = {
    **_ON_BOTH,
    "worker class": (
        _unless(
            frozenset({"vllm.v1.worker.cpu_worker.CPUWorker"}),
            lambda c: c.parallel_config.worker_cls,
        ),
        "another worker has other seams",
    ),
    "compilation": (
        _unless(frozenset({"NONE"}), lambda c: c.compilation_config.mode),
        "compiled CPU graphs are not certified",
    ),
}

ON_CUDA: Checks = {
    **_ON_BOTH,
    "worker class": (
        _unless(
            frozenset({"vllm.v1.worker.gpu_worker.Worker"}),
            lambda c: c.parallel_config.worker_cls,
        ),
        "another worker has other seams",
    ),
    "model runner": (
        lambda c: c.use_v2_model_runner,
        "vLLM's V2 runner has other seams",
    ),
    "attention backend": (
        _unless(frozenset({"CUSTOM"}), lambda c: c.attention_config.backend),
        "only our own attention is certified",
    ),
    "attention backends by kind": (
        lambda c: c.attention_config.backend_per_kind,
        "only our own attention is certified",
    ),
    "model dtype": (
        _unless(
            frozenset({"torch.bfloat16", "torch.float16"}), lambda c: str(c.model_config.dtype)
        ),
        "the kernels take bfloat16 and float16",
    ),
    "compilation": (
        _unless(frozenset({"NONE", "VLLM_COMPILE"}), lambda c: c.compilation_config.mode),
        "other ways to compile are not certified",
    ),
    "tuning by the compiler": (
        lambda c: any("autotune" in key for key in c.compilation_config.inductor_compile_config),
        "a kernel chosen by a timing may add in another order",
    ),
    "experts over ranks": (
        lambda c: c.parallel_config.enable_expert_parallel or c.parallel_config.enable_eplb,
        "experts moved between ranks are not certified",
    ),
}


def refusals(config: Any, checks: Checks) -> list[str]:
    """What of `config`, a resolved `VllmConfig`, is not certified; empty if nothing."""
    return [f"{name}: {why}" for name, (check, why) in checks.items() if check(config)]
