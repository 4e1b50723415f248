"""Decides how vLLM is started: arguments and environment of one worker. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from isobatch_contracts.tiers import PoolName

from isobatch_worker.cache import plans_dir
from isobatch_worker.engine_config import On, refused_options
from isobatch_worker.request_settings import request_settings

CPU_DEFAULTS: tuple[tuple[str, ...], ...] = (
    ("--enforce-eager",),
    ("--dtype", "bfloat16"),
    ("--max-model-len", "2048"),
    ("--max-num-seqs", "32"),
)
"""Added on a CPU unless the arguments say otherwise: a compiled CPU start took 189 s."""

CPU_CACHE_BYTES = "512M"
"""KV cache on a CPU unless told otherwise: vLLM would take most of the machine's memory."""

STRICT_GRAMMARS = ("--structured-outputs-config.backend", "xgrammar")
"""Added in strict unless its option is given: with vLLM's `auto` the first request that asks for a
grammar decides which library masks everybody's tokens."""

OWNED = frozenset({"--model", "--host", "--port", "--served-model-name"})
_ALIASES = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
}


class WrongUse(ValueError):
    """Arguments or environment that the worker cannot start with; exit code 2."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What `isobatch worker` was asked for, the model resolved."""

    pool: PoolName
    model_path: str
    model_digest: str
    served_name: str
    host: str
    port: int
    vllm_args: tuple[str, ...]
    is_cpu: bool
    cores: int
    report_path: str
    cache_folder: str
    digest_of_file: Callable[[str], str | None]
    """Digest of the file that an argument names, None if it names none."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How the vLLM process is started: arguments after the interpreter, and environment to add."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


def compose(settings: Settings, environment: Mapping[str, str]) -> Launch:
    """The launch for `settings` within `environment`. Raises `WrongUse` for what cannot be."""
    _refuse(settings, environment)
    arguments = [
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", settings.model_path, "--served-model-name", settings.served_name),
        *("--host", settings.host, "--port", str(settings.port)),
    ]
    given = settings.vllm_args
    if settings.is_cpu:
        given = (*_cpu_defaults(given, environment), *given)
    added = _environment(settings, environment)
    if settings.pool is PoolName.STRICT:
        if "--structured-outputs-config" not in _flags(given):
            given = (*STRICT_GRAMMARS, *given)
        arguments += ["--middleware", "isobatch_worker.endpoint.NumericsEndpoint"]
        added["ISOBATCH_SETTINGS"] = request_settings(given, environment, settings.digest_of_file)
        if not settings.is_cpu:
            arguments += ["--attention-backend", "CUSTOM"]
    return Launch((*arguments, *given), added)


def _flags(arguments: tuple[str, ...]) -> set[str]:
    """The options among `arguments`, in their long spelling, without values and JSON paths."""
    flags = {a.split("=", 1)[0].replace("_", "-") for a in arguments if a.startswith("-")}
    flags = {flag.split(".", 1)[0] for flag in flags}
    return {"--optimization-level" if f.startswith("-O") else _ALIASES.get(f, f) for f in flags}


def _refuse(settings: Settings, environment: Mapping[str, str]) -> None:
    flags = _flags(settings.vllm_args)
    owned = sorted(flags & OWNED)
    if owned:
        raise WrongUse(f"{', '.join(owned)}: given by isobatch; use the worker's own options")
    if settings.is_cpu and environment.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        raise WrongUse(
            "VLLM_BATCH_INVARIANT is set, which kills the engine on a CPU at the first request; "
            "unset it: the strict pool does not need it"
        )
    if settings.pool is PoolName.STRICT:
        known = refused_options(On.CPU if settings.is_cpu else On.CUDA)
        refused = sorted(flags & known.keys())
        if refused:
            reasons = "; ".join(f"{flag}: {known[flag]}" for flag in refused)
            raise WrongUse(f"the strict pool cannot start with {reasons}")


def _cpu_defaults(given: tuple[str, ...], environment: Mapping[str, str]) -> list[str]:
    flags = _flags(given)
    added: list[str] = []
    for default in CPU_DEFAULTS:
        if not flags & {default[0], default[0].replace("--", "--no-", 1)}:
            added += default
    sizes = {"--kv-cache-memory-bytes", "--gpu-memory-utilization"}
    if not flags & sizes and "VLLM_CPU_KVCACHE_SPACE" not in environment:
        added += ["--kv-cache-memory-bytes", CPU_CACHE_BYTES]
    return added


def _environment(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    added = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if "PYTHONPYCACHEPREFIX" not in environment:
        # Three processes of a worker import torch and vLLM one after the other: 22 s each from
        # source, 9 s from bytecode, which the packages' own folders may not keep.
        added["PYTHONPYCACHEPREFIX"] = f"{settings.cache_folder}/bytecode"
        added["PYTHONDONTWRITEBYTECODE"] = ""
    if settings.is_cpu and "VLLM_CPU_OMP_THREADS_BIND" not in environment:
        # vLLM binds every worker of a machine to the same cores; its count is kept, not the pin.
        added["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        added["OMP_NUM_THREADS"] = environment.get(
            "OMP_NUM_THREADS", str(max(1, settings.cores - 1))
        )
    if settings.pool is PoolName.STRICT:
        added |= {
            "ISOBATCH_POOL": "strict",
            "ISOBATCH_NUMERICS_REPORT": settings.report_path,
            "ISOBATCH_MODEL_DIGEST": settings.model_digest,
            "ISOBATCH_PLANS": str(plans_dir(Path(settings.cache_folder))),
            "VLLM_PLUGINS": "isobatch",
            "VLLM_CPU_ATTN_SPLIT_KV": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0" if settings.is_cpu else "1",
        }
        if not settings.is_cpu:
            # A graph that a stock worker compiled holds stock layers: never to be found by ours.
            added["VLLM_CACHE_ROOT"] = f"{settings.cache_folder}/vllm-strict"
            added["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return added
