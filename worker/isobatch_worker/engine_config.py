"""Decides what strict refuses: one table, for options, configuration and models. Pure.

Flags have aliases, dotted forms and files; what they came to has one spelling. So the arguments
are refused early where they are recognized, and the configuration is what is believed. What only
the loaded model shows stands here in words; `coverage` and the attention layers find it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

Check = Callable[[Any], object]
"""Configuration -> the setting, falsy where it is as certified."""


class On(Enum):
    """Which workers refuse it."""

    BOTH = "everywhere"
    CPU = "on a CPU"
    CUDA = "on a card"


@dataclass(frozen=True, slots=True)
class Refused:
    """One thing that strict refuses, and why.

    `options` are vLLM's, refused before anything starts; `check` reads the resolved configuration,
    None where the option or the loaded model tells.
    """

    name: str
    why: str
    options: tuple[str, ...] = ()
    check: Check | None = None
    on: On = On.BOTH


def _unless(allowed: frozenset[object], read: Check) -> Check:
    def check(config: Any) -> object:
        value = read(config)
        plain = getattr(value, "name", value)
        return None if plain in allowed else repr(plain)

    return check


def _ranks(config: Any) -> bool:
    parallel = config.parallel_config
    return bool(
        max(
            parallel.world_size,
            parallel.data_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.prefill_context_parallel_size,
        )
        > 1
    )


REFUSED: tuple[Refused, ...] = (
    Refused(
        "speculative decoding",
        "drafts make the batch's shape part of the arithmetic",
        ("--speculative-config",),
        check=lambda c: c.speculative_config,
    ),
    Refused(
        "grammars by whoever asks first",
        "under backend auto one request decides which library masks all tokens; name one in "
        "--structured-outputs-config",
        check=lambda c: c.structured_outputs_config.backend == "auto",
    ),
    Refused(
        "quantization",
        "quantized linears are not certified",
        ("--quantization",),
        check=lambda c: c.quant_config or c.model_config.quantization,
    ),
    Refused(
        "LoRA",
        "LoRA linears are not certified",
        ("--enable-lora",),
        check=lambda c: c.lora_config,
    ),
    Refused(
        "KV cache dtype",
        "a quantized KV cache is not certified",
        ("--kv-cache-dtype",),
        check=_unless(
            frozenset({"auto", "bfloat16", "float16"}), lambda c: c.cache_config.cache_dtype
        ),
    ),
    Refused(
        "KV scales",
        "scales follow what was served first",
        check=lambda c: c.cache_config.calculate_kv_scales,
    ),
    Refused(
        "KV sharing",
        "it skips layers of a prefill",
        check=lambda c: c.cache_config.kv_sharing_fast_prefill,
    ),
    Refused(
        "KV transfer",
        "keys of another process are not certified",
        check=lambda c: c.kv_transfer_config,
    ),
    Refused(
        "encoder transfer",
        "embeddings of another process are not certified",
        check=lambda c: c.ec_transfer_config,
    ),
    Refused(
        "several ranks",
        "reductions over ranks are not certified",
        ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
        check=_ranks,
    ),
    Refused(
        "experts over ranks",
        "experts moved between ranks are not certified",
        check=lambda c: c.parallel_config.enable_expert_parallel or c.parallel_config.enable_eplb,
    ),
    Refused(
        "micro-batches",
        "a batch cut in two is not certified",
        check=lambda c: c.parallel_config.enable_dbo or c.parallel_config.ubatch_size,
    ),
    Refused(
        "multimodal input",
        "towers for other media are not certified",
        check=lambda c: c.model_config.is_multimodal_model,
    ),
    Refused(
        "pooling",
        "only generation is certified",
        check=_unless(frozenset({"generate"}), lambda c: c.model_config.runner_type),
    ),
    Refused(
        "model class with other layers",
        "nothing is proved of them; the refusal names them",
    ),
    Refused(
        "mixture of experts",
        "its routing and grouped linears are not wired into the strict pool",
    ),
    Refused(
        "ALiBi, attention sinks, encoder attention, keys of another layer",
        "not what the attention kernels compute",
    ),
    Refused(
        "rotary pairs of neighbours (GPT-J style)",
        "not what the rotary kernel computes",
        on=On.CUDA,
    ),
    Refused(
        "attention backend",
        "only our own attention is certified",
        ("--attention-backend",),
        check=_unless(frozenset({"CUSTOM"}), lambda c: c.attention_config.backend),
        on=On.CUDA,
    ),
    Refused(
        "attention backends by kind",
        "only our own attention is certified",
        check=lambda c: c.attention_config.backend_per_kind,
        on=On.CUDA,
    ),
    Refused(
        "attention dtype",
        "the attention kernel is chosen by certification",
        check=lambda c: c.model_config.override_attention_dtype,
    ),
    Refused(
        "model dtype",
        "the kernels take bfloat16 and float16",
        check=_unless(
            frozenset({"torch.bfloat16", "torch.float16"}), lambda c: str(c.model_config.dtype)
        ),
        on=On.CUDA,
    ),
    Refused(
        "model runner",
        "vLLM's V1 runner has other seams, and V2 is what stock runs on a card",
        check=lambda c: not c.use_v2_model_runner,
        on=On.CUDA,
    ),
    Refused(
        "worker class",
        "another worker has other seams",
        ("--worker-cls",),
        check=_unless(
            frozenset({"vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker"}),
            lambda c: c.parallel_config.worker_cls,
        ),
    ),
    Refused(
        "worker extension",
        "another worker has other seams",
        ("--worker-extension-cls",),
        check=lambda c: c.parallel_config.worker_extension_cls,
    ),
    Refused(
        "scheduler class",
        "another scheduler has other seams",
        ("--scheduler-cls",),
        check=lambda c: isinstance(c.scheduler_config.scheduler_cls, str),
    ),
    Refused(
        "logits processors",
        "foreign logits processors are not certified",
        ("--logits-processors",),
        check=lambda c: c.model_config.logits_processors,
    ),
    Refused(
        "logprobs mode",
        "only raw_logprobs are certified",
        ("--logprobs-mode",),
        check=_unless(frozenset({"raw_logprobs"}), lambda c: c.model_config.logprobs_mode),
    ),
    Refused(
        "max logprobs",
        "logprobs of the whole vocabulary change the form of a neighbour's",
        check=lambda c: c.model_config.max_logprobs == -1,
    ),
    Refused(
        "weight transfer",
        "weights must stay those that were certified",
        check=lambda c: c.weight_transfer_config,
    ),
    Refused(
        "compilation",
        "compiled CPU graphs are not certified",
        ("--no-enforce-eager",),
        check=_unless(frozenset({"NONE"}), lambda c: c.compilation_config.mode),
        on=On.CPU,
    ),
    Refused(
        "compilation mode",
        "other ways to compile are not certified",
        ("--compilation-config", "--optimization-level"),
        check=_unless(frozenset({"NONE", "VLLM_COMPILE"}), lambda c: c.compilation_config.mode),
    ),
    Refused(
        "tuning by the compiler",
        "a kernel chosen by a timing may add in another order",
        check=lambda c: any(
            "autotune" in key for key in c.compilation_config.inductor_compile_config
        ),
        on=On.CUDA,
    ),
    Refused(
        "file of arguments",
        "files that it names are not in the fingerprint; give its arguments one by one",
        ("--config",),
    ),
    Refused(
        "another vLLM, an unknown card",
        "nothing is known of it",
    ),
)
"""In the order of the README's table, which is made of it."""


def refused_on(device: On) -> tuple[Refused, ...]:
    """What a worker on `device` refuses."""
    return tuple(refused for refused in REFUSED if refused.on in (On.BOTH, device))


def refusals(config: Any, device: On) -> list[str]:
    """What of `config`, a resolved `VllmConfig`, is not certified; empty if nothing."""
    return [
        f"{refused.name}: {refused.why}"
        for refused in refused_on(device)
        if refused.check is not None and refused.check(config)
    ]


def refused_options(device: On) -> dict[str, str]:
    """Options of vLLM that a strict worker on `device` refuses, each with the reason."""
    return {option: one.why for one in refused_on(device) for option in one.options}
