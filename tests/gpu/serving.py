"""Measures one model whole on the card: do its bits move with the batch, and how fast does it run.

    python -m tests.gpu.serving --model Llama-3.1-8B --pool strict --out DIR [--budget 300]

`--pool stock` is vLLM as it comes, `invariant` is vLLM's own batch-invariant mode. A model by name
has seeded weights of a real scale (vLLM's dummy weights of +-1e-3 hide every difference);
`builtin://smollm2-135m` has its own. One pool a process: vLLM keeps what it was started with.
"""

import argparse
import cProfile
import hashlib
import os
import pstats
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isobatch_contracts.tiers import PoolName
from isobatch_worker.cache import default_cache_dir
from isobatch_worker.compose import STRICT_GRAMMARS, Settings, compose
from isobatch_worker.models import resolve, show_progress
from isobatch_worker.report import read_report

from tests.gpu.models import SHAPES, draw_weights, write_config

POOLS = ("strict", "stock", "invariant")
LOADS = ((1, 128, 128), (8, 128, 128), (64, 512, 128), (256, 512, 128), (256, 1024, 64))
"""(requests, tokens in, tokens out) of the throughput rows."""

CROWDS = (0, 7, 48, 200)
"""Neighbours beside the requests whose bits are watched."""

Bits = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was asked for."""

    model: str
    pool: str
    out: Path
    budget: float
    loads: bool
    watched: int
    runs: int
    longest: int
    cache_gib: float
    profiled: list[tuple[int, int, int]]


def main() -> None:
    """Measure and write `serving-MODEL-POOL.json`, whole after each step."""
    options = _options()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        llm, ready = _start(options, Path(folder))
        # Only now: the record asks the card, which vLLM must be the first to open.
        from tests.gpu.record import Budget, Record, attempted, environment, say

        budget = Budget(options.budget)
        name = options.model.replace("/", "_").replace(":", "")
        facts: dict[str, Any] = {
            **environment(),
            "model": options.model,
            "pool": options.pool,
            "start_seconds": time.monotonic() - started,
            **ready,
        }
        record = Record(options.out / f"serving-{name}-{options.pool}.json", facts)
        record.save()
        steps: list[tuple[str, Any]] = []
        if options.loads:
            loads = [load for load in LOADS if sum(load[1:]) <= options.longest]
            steps += [(f"load {load}", partial(speed, llm, load)) for load in loads]
        steps += [(f"profile {load}", partial(profile, llm, load)) for load in options.profiled]
        if options.runs:
            steps.append(("bits", partial(bits, llm, options, budget)))
        for label, step in steps:
            if budget.is_spent():
                record.data[label] = "not run: the budget was spent"
                continue
            record.data[label] = attempted(step)
            record.save()
            say(budget, f"{options.model} {options.pool} {label}: {record.data[label]}")


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help=f"builtin://... or one of {sorted(SHAPES)}")
    parser.add_argument("--pool", required=True, choices=POOLS)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--budget", type=float, default=300)
    parser.add_argument("--no-loads", dest="loads", action="store_false")
    parser.add_argument("--watched", type=int, default=16, help="requests whose bits are compared")
    parser.add_argument("--runs", type=int, default=4, help="times they are served among others")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--cache-gib", type=float, default=0, help="KV cache beside other runs")
    parser.add_argument("--profiled", type=_load, action="append", default=[], help="8,128,64")
    return Options(**vars(parser.parse_args()))


def _load(text: str) -> tuple[int, int, int]:
    requests, tokens_in, tokens_out = (int(part) for part in text.split(","))
    return requests, tokens_in, tokens_out


def _start(options: Options, folder: Path) -> tuple[Any, dict[str, Any]]:
    """vLLM in this process, as `isobatch worker` would start it in another; what it reports."""
    is_built_in = "://" in options.model
    if is_built_in:
        found = resolve(
            options.model,
            cache_dir=default_cache_dir(),
            expected_digest=None,
            progress=show_progress,
        )
        path, digest = str(found.path), found.digest
    else:
        path = str(write_config(options.model, folder))
        digest = f"sha256:{hashlib.sha256(options.model.encode()).hexdigest()}"
    arguments: dict[str, Any] = {"max_model_len": options.longest, "max_num_seqs": 256}
    if not is_built_in:
        arguments |= {"load_format": "dummy", "skip_tokenizer_init": True}
    arguments["gpu_memory_utilization"] = 0.05 if options.cache_gib else 0.85
    if options.cache_gib:
        arguments["kv_cache_memory_bytes"] = int(options.cache_gib * 2**30)
    report = folder / "numerics.json"
    _environment(options, path, digest, report)
    if options.pool == "strict":
        from isobatch_worker.plugin import register

        register()
        arguments["attention_backend"] = "CUSTOM"
        arguments["structured_outputs_config"] = {"backend": STRICT_GRAMMARS[1]}
    if not is_built_in:
        draw_weights()
    from vllm import LLM

    llm = LLM(path, disable_log_stats=True, **arguments)
    cache = llm.llm_engine.vllm_config.cache_config
    ready: dict[str, Any] = {
        "kv_cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "block_size": cache.block_size,
    }
    if options.pool == "strict":
        ready["certificate"] = read_report(report).model_dump(mode="json")
        if ready["certificate"].get("state") != "certified":
            raise SystemExit(f"not certified: {ready['certificate']}")
    return llm, ready


def _environment(options: Options, path: str, digest: str, report: Path) -> None:
    """What the worker's composition would set, here and now: before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if options.pool == "invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if options.pool != "strict":
        return
    settings = Settings(
        pool=PoolName.STRICT,
        model_path=path,
        model_digest=digest,
        served_name="model",
        host="127.0.0.1",
        port=8000,
        vllm_args=(),
        is_cpu=False,
        cores=os.cpu_count() or 1,
        report_path=str(report),
        cache_folder=str(default_cache_dir()),
        digest_of_file=lambda _: None,
    )
    os.environ.update(compose(settings, os.environ).environment)


def _prompts(draw: random.Random, count: int, tokens: int) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [draw.randrange(3, 32_000) for _ in range(tokens)]}
        for _ in range(count)
    ]


def speed(llm: Any, load: tuple[int, int, int]) -> dict[str, float]:
    """Output tokens a second at `load`: the second of two passes, as the first one compiles."""
    from vllm import SamplingParams

    requests, tokens_in, tokens_out = load
    params = SamplingParams(temperature=0, max_tokens=tokens_out, ignore_eos=True, detokenize=False)
    seconds = []
    for number in range(3):
        prompts = _prompts(random.Random(f"{load} {number}"), requests, tokens_in)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    best = min(seconds[1:])
    return {"seconds": best, "tokens_per_second": requests * tokens_out / best}


def profile(llm: Any, load: tuple[int, int, int]) -> dict[str, Any]:
    """Where the time of `load` goes: kernels and host functions, the longest first.

    Seconds on the card against seconds in all say whether the host kept up with it.
    """
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch
    from vllm import SamplingParams

    requests, tokens_in, tokens_out = load
    params = SamplingParams(temperature=0, max_tokens=tokens_out, ignore_eos=True, detokenize=False)

    def serve(label: str) -> float:
        prompts = _prompts(random.Random(f"profile {label} {load}"), requests, tokens_in)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    serve("warm-up")
    seconds = serve("bare")
    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        serve("card")
    host = cProfile.Profile()
    host.runcall(serve, "host")
    found = [(e.key[:120], e.count, e.device_time_total / 1e6) for e in seen.key_averages()]
    # Not get_stats_profile(), which keeps one function of a name.
    functions: dict[tuple[str, int, str], Any] = vars(pstats.Stats(host))["stats"]
    own = [
        (f"{'/'.join(Path(at[0]).parts[-3:])}:{at[2]}", f[1], f[2]) for at, f in functions.items()
    ]
    return {
        "seconds": seconds,
        "seconds on the card": sum(kernel[2] for kernel in found),
        "kernels": sorted(found, key=lambda kernel: -kernel[2])[:20],
        "host": sorted(own, key=lambda function: -function[2])[:40],
    }


def bits(llm: Any, options: Options, budget: Any) -> dict[str, Any]:
    """Watched requests alone, then among crowds: pairs compared, and outputs that moved."""
    draw = random.Random(f"bits of {options.model}")
    long = min(3000, options.longest - 80)
    watched = [
        (*_prompts(draw, 1, long if n % 4 == 1 else draw.randrange(20, 200)), _params(draw, n))
        for n in range(options.watched)
    ]
    alone = [_bits(llm.generate([p], s, use_tqdm=False)[0]) for p, s in watched]
    found: dict[str, Any] = {"pairs": 0, "tokens moved": 0, "logprobs moved": 0, "runs": 0}
    for run in range(options.runs):
        if budget.is_spent():
            break
        if run % 2:
            llm.reset_prefix_cache()  # cold every other time
        crowd = CROWDS[run % len(CROWDS)]
        lengths = [draw.choice((20, 300, min(900, long))) for _ in range(crowd)]
        others = [(*_prompts(draw, 1, size), _params(draw, draw.randrange(99))) for size in lengths]
        _compare(found, alone, _served(llm, [*watched, *others], draw), f"run {run} among {crowd}")
        found["runs"] += 1
    return found


def _params(draw: random.Random, number: int) -> Any:
    """Greedy for even numbers, at temperature 1 for odd ones."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=float(number % 2), seed=draw.randrange(2**40),
        max_tokens=64, ignore_eos=True, detokenize=False, logprobs=0,
    )  # fmt: skip


def _served(llm: Any, requests: list[tuple[Any, Any]], draw: random.Random) -> list[Bits]:
    """The bits of `requests`, all at once and in a drawn order."""
    order = list(range(len(requests)))
    draw.shuffle(order)
    prompts, params = zip(*(requests[i] for i in order), strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    got = dict(zip(order, map(_bits, outputs), strict=True))
    return [got[i] for i in range(len(requests))]


def _bits(output: Any) -> Bits:
    (one,) = output.outputs
    logprobs = tuple(next(iter(at.values())).logprob for at in one.logprobs)
    return tuple(one.token_ids), logprobs


def _compare(found: dict[str, Any], wanted: Sequence[Bits], got: Sequence[Bits], how: str) -> None:
    found["pairs"] += sum(len(ids) for ids, _ in wanted)
    pairs = list(zip(wanted, got[: len(wanted)], strict=True))
    moved = sum(a[0] != b[0] for a, b in pairs)
    logprobs = sum(a[1] != b[1] for a, b in pairs)
    found["tokens moved"] += moved
    found["logprobs moved"] += logprobs
    if moved or logprobs:
        found[how] = {"tokens": moved, "logprobs": logprobs}


if __name__ == "__main__":
    main()
