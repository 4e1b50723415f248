"""Decides which arguments and environment can reach an answer, and so its fingerprint. Pure.

Conservative: an argument is part of the fingerprint unless it is named here, and so is a variable
that libraries of arithmetic read. That equal answers
come of two fingerprints is another statement, made by running both.
"""

import hashlib
import json
from collections.abc import Callable, Mapping

NEUTRAL = frozenset(
    {
        # how much is batched, cached and kept: what certification proves not to reach the bits
        *("--max-num-seqs", "--max-num-batched-tokens", "--enable-chunked-prefill"),
        *("--no-enable-chunked-prefill", "--enable-prefix-caching", "--no-enable-prefix-caching"),
        *("--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--gpu-memory-utilization"),
        *("--async-scheduling", "--no-async-scheduling", "--scheduling-policy"),
        # what is logged and measured
        *("--uvicorn-log-level", "--disable-log-stats", "--enable-log-requests"),
        *("--disable-uvicorn-access-log", "--otlp-traces-endpoint", "--disable-log-requests"),
        # who may call, and how
        *("--api-key", "--ssl-keyfile", "--ssl-certfile", "--root-path", "--allowed-origins"),
        # in the plan already
        "--dtype",
    }
)

"""Not among them is `--enforce-eager`: what lies between our operators is then another kernel's."""

_READ_BY_ARITHMETIC = (
    *("VLLM_", "TORCH", "PYTORCH_", "ATEN_", "TRITON_", "CUBLAS", "NVIDIA_TF32_OVERRIDE"),
    *("CUDNN_", "ONEDNN_", "DNNL_", "MKL_", "OPENBLAS_", "CUDA_FORCE_"),
)
"""How the names of variables begin that can choose a kernel or a rounding."""

_NEUTRAL_VARIABLES = (
    # where things are kept, who is who, what is logged; a cluster sets VLLM_SERVICE_… for a service
    *("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_ASSETS_CACHE", "VLLM_RPC_", "VLLM_API_KEY"),
    *("VLLM_HOST_IP", "VLLM_PORT", "VLLM_SERVICE_", "VLLM_LOGGING_", "VLLM_LOG_", "VLLM_DEBUG_"),
    *("VLLM_CONFIGURE_LOGGING", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "VLLM_USAGE_"),
    *("VLLM_ENGINE_", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NCCL_SO_PATH", "VLLM_IMAGE_"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME", "TORCH_LOGS", "TRITON_CACHE_", "TRITON_HOME"),
    *("TRITON_DUMP_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    # how much is kept; threads, which the plan's arithmetic names
    *("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "MKL_NUM_THREADS"),
    # fixed by the worker itself in strict
    *("VLLM_PLUGINS", "VLLM_CPU_ATTN_SPLIT_KV", "VLLM_USE_V2_MODEL_RUNNER"),
    "VLLM_USE_FLASHINFER_SAMPLER",
)


def request_settings(
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    digest_of_file: Callable[[str], str | None],
) -> str:
    """`sha256:…` of arguments that are not `NEUTRAL`, files by what they hold, and of variables.

    `digest_of_file` gives the digest of the file that a value names, None if it names none.
    """
    kept = []
    for flag, value in sorted(_pairs(arguments)):
        if flag not in NEUTRAL:
            kept.append((flag, digest_of_file(value) or value))
    for name, value in sorted(environment.items()):
        if name.startswith(_READ_BY_ARITHMETIC) and not name.startswith(_NEUTRAL_VARIABLES):
            kept.append((name, value))
    return "sha256:" + hashlib.sha256(json.dumps(kept).encode()).hexdigest()


def _pairs(arguments: tuple[str, ...]) -> list[tuple[str, str]]:
    """(flag, its values joined) of each argument; a flag without a value has ""."""
    pairs: list[tuple[str, str]] = []
    for argument in arguments:
        if argument.startswith("-") and not argument[1:2].isdigit():
            flag, _, value = argument.partition("=")
            pairs.append((flag.replace("_", "-"), value))
        elif pairs:
            flag, before = pairs[-1]
            pairs[-1] = (flag, f"{before} {argument}".strip())
        else:
            pairs.append(("", argument))
    return pairs
