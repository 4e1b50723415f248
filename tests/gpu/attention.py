"""Certifies every schedule of paged attention on this card and times them beside FlashAttention-3.

`python -m tests.gpu.attention --out DIR --budget SECONDS`, kernels/ on the path. Writes
DIR/attention.json after every step and prints a table last. What fails is recorded, not fatal.
"""

import argparse
import itertools
import multiprocessing
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from isobatch_kernels.attention_proofs import (
    attention_operators,
    fill_cache,
    schedule_call,
)
from isobatch_kernels.attention_schedules import (
    REFERENCE,
    AttentionSchedule,
    Bounds,
    Chooser,
    Launch,
    partial_floats,
    schedules,
)
from isobatch_kernels.attention_tree import AttentionShape, AttentionTree, tree_of
from isobatch_kernels.bits import as_bits
from isobatch_kernels.certification import CertificationRefused, certify
from isobatch_kernels.paged_attention import PagedBatch, Workspace, run_launch

from tests.gpu.stopwatch import Call, Deadline, facts, medians, save, say

HEADS = {"llama-8b": (32, 8), "qwen3-0.6b": (16, 8), "qwen3-14b": (40, 8), "qwen3-30b-a3b": (32, 4)}
DECODES = [(b, k) for b in (1, 4, 16, 64, 256) for k in (1024, 4096, 16384, 32768)]
PREFILLS = [512, 1024, 2048, 4096, 8192]
BLOCK_SIZES = (16, 64)
ROTATED_BYTES = 200 << 20  # of keys and values in turn: several times the L2 cache
CACHE_BYTES = 48 << 30


@dataclass(frozen=True, slots=True)
class Setting:
    """A shape over cache blocks of one size."""

    name: str
    shape: AttentionShape
    block_size: int


def settings() -> list[Setting]:
    return [
        Setting(
            f"{name}/block-{block_size}",
            AttentionShape(heads, kv_heads, 128, torch.bfloat16, scale=128**-0.5),
            block_size,
        )
        for name, (heads, kv_heads) in HEADS.items()
        for block_size in BLOCK_SIZES
    ]


def warm(setting: Setting, some: list[AttentionSchedule]) -> list[str]:
    """Compile `some` schedules into Triton's cache on disk, in a process of its own."""
    failures = []
    tree = tree_of(setting.shape)
    cache = fill_cache(setting.shape, setting.block_size, 2 * tree.chunk, torch.device("cuda"), 0)
    for schedule in some:
        for tokens in (1, 80):  # one tile a request, and several
            query = torch.randn(tokens, setting.shape.heads, setting.shape.head_size)
            query = query.to(setting.shape.dtype)
            lengths = torch.tensor([tokens]), torch.tensor([100])
            try:
                call = schedule_call(cache, tree, schedule, 2)
                call(query, lengths[0].int(), lengths[1].int(), torch.tensor([0]))
                torch.cuda.synchronize()
            except Exception as exc:  # noqa: BLE001  # what does not compile is reported, not fatal
                failures.append(f"{schedule.name}: {type(exc).__name__}: {exc}"[:400])
    return failures


def warm_all(chosen: list[Setting], deadline: Deadline) -> list[str]:
    """Compile in parallel: Triton takes seconds a kernel, and one process makes one at a time."""
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    jobs = []
    for setting in chosen:
        every = list(schedules(setting.shape, tree_of(setting.shape), setting.block_size))
        parts = max(1, workers // 2)
        jobs += [(setting, every[i::parts]) for i in range(parts)]
    failures: list[str] = []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        running = [pool.apply_async(warm, job) for job in jobs]
        for done in running:
            try:
                failures += done.get(timeout=max(1.0, deadline.left()))
            except multiprocessing.TimeoutError:
                return [*failures, "compiling ran past the budget"]
    return failures


def prove(setting: Setting, report: dict[str, object]) -> tuple[AttentionSchedule, ...]:
    """The schedules of `setting` with the reference's bits; proofs go into `report`."""
    tree = tree_of(setting.shape)
    cache = fill_cache(setting.shape, setting.block_size, 720, torch.device("cuda"), 1)
    candidates = schedules(setting.shape, tree, setting.block_size)
    operators = attention_operators(cache, tree, candidates, (), seed=2)
    admitted, refused = [], {}
    for candidate, operator in zip(candidates, operators, strict=True):
        try:
            proof = certify(operator)
        except (CertificationRefused, RuntimeError, ValueError) as exc:
            refused[candidate.name] = f"{type(exc).__name__}: {exc}"[:500]
            continue
        if proof.admitted[candidate.name]:
            admitted.append(candidate)
        refused |= proof.refused
    report[setting.name] = {
        "tree": tree.name,
        "admitted": [s.name for s in admitted],
        "refused": refused,
    }
    say(f"{setting.name}: {len(admitted)} of {len(candidates)} schedules admitted")
    for name, why in refused.items():
        say(f"  refused {name}: {why[:200]}")
    return tuple(admitted)


def timing_batches(setting: Setting, requests: int, query: int, keys: int) -> list[PagedBatch]:
    """Equal requests over one cache, in as many sets of blocks as keep the L2 cache cold."""
    shape, device = setting.shape, torch.device("cuda")
    per_request = -(-keys // setting.block_size)
    row_bytes = 2 * shape.kv_heads * shape.head_size * 2
    one = requests * per_request * setting.block_size * row_bytes
    if one > CACHE_BYTES:
        raise ValueError(f"{one >> 30} GiB of keys and values")
    sets = max(1, min(16, -(-ROTATED_BYTES // one)))
    blocks = sets * requests * per_request
    packed = torch.empty(
        (blocks, setting.block_size, shape.kv_heads, 2 * shape.head_size),
        dtype=shape.dtype, device=device,
    ).normal_()  # fmt: skip
    order = torch.randperm(blocks, device=device).to(torch.int32)
    tables = order.reshape(sets, requests, per_request)
    q = torch.randn(requests * query, shape.heads, shape.head_size, device=device).to(shape.dtype)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * query
    lengths = torch.full((requests,), keys, dtype=torch.int32, device=device)
    key, value = packed.chunk(2, dim=-1)
    return [
        PagedBatch(q, key, value, torch.empty_like(q), table, starts, lengths, query, keys)
        for table in tables
    ]


def our_calls(
    shape: AttentionShape, tree: AttentionTree, batches: list[PagedBatch], launches: list[Launch]
) -> list[Call]:
    """`launches` on each of `batches`, one workspace for all."""
    floats = 32
    for launch in launches:
        if launch.schedule.split:
            slots = batches[0].requests * launch.max_query
            floats = max(floats, partial_floats(shape, tree, slots, batches[0].max_seq_len))
    workspace = Workspace(
        torch.empty(floats, dtype=torch.float32, device="cuda"),
        torch.zeros(batches[0].requests * shape.kv_heads, dtype=torch.int32, device="cuda"),
    )

    def call(batch: PagedBatch) -> None:
        for launch in launches:
            run_launch(shape, tree, batch, launch, workspace)

    return [partial(call, batch) for batch in batches]


def flash_calls(setting: Setting, batches: list[PagedBatch], *, planned: bool) -> list[Call]:
    """FlashAttention-3 as vLLM ships it; `planned`: with its schedule computed beforehand, as
    vLLM does once a step for all layers."""
    from vllm.vllm_flash_attn import (  # a machine without vLLM times ours alone
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    shape = setting.shape
    plan = None
    if planned:
        first = batches[0]
        plan = get_scheduler_metadata(
            batch_size=first.requests, max_seqlen_q=first.max_query_len,
            max_seqlen_k=first.max_seq_len, num_heads_q=shape.heads, num_heads_kv=shape.kv_heads,
            headdim=shape.head_size, cache_seqlens=first.seq_lens, qkv_dtype=shape.dtype,
            cu_seqlens_q=first.cu_query_lens, page_size=setting.block_size, causal=True,
        )  # fmt: skip

    def call(batch: PagedBatch) -> None:
        flash_attn_varlen_func(
            batch.query, batch.key_cache, batch.value_cache, max_seqlen_q=batch.max_query_len,
            cu_seqlens_q=batch.cu_query_lens, max_seqlen_k=batch.max_seq_len,
            seqused_k=batch.seq_lens, softmax_scale=shape.scale, causal=True,
            block_table=batch.block_table, out=batch.out, fa_version=3, scheduler_metadata=plan,
        )  # fmt: skip

    return [partial(call, batch) for batch in batches]


def contenders(
    setting: Setting, admitted: tuple[AttentionSchedule, ...], batches: list[PagedBatch]
) -> dict[str, list[Call]]:
    """By name: the launcher's choice, each admitted schedule that fits, and the rival."""
    shape, tree, first = setting.shape, tree_of(setting.shape), batches[0]
    decode = first.max_query_len == 1
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    chooser = Chooser(shape, tree, admitted, multiprocessors, 64 << 20, 4096)
    bounds = Bounds(first.requests, first.query.shape[0], first.max_query_len, first.max_seq_len)
    chosen = list(chooser.launches(bounds))
    found = {"choice": our_calls(shape, tree, batches, chosen)}
    slots = first.requests * first.max_query_len
    for schedule in admitted:
        if decode != (schedule.rows == 16) or (schedule.split and not decode):
            continue
        if not schedule.split:
            launch = [Launch(schedule, 1, first.max_query_len, 1)]
            found[schedule.name] = our_calls(shape, tree, batches, launch)
        elif partial_floats(shape, tree, slots, first.max_seq_len) <= 64 << 20:
            programs = first.requests * shape.kv_heads
            for waves in (2, 4, 8):
                splits = max(1, waves * multiprocessors // programs)
                launch = [Launch(schedule, 1, 1, splits)]
                found[f"{schedule.name}/{splits}"] = our_calls(shape, tree, batches, launch)
    for name, planned in (("fa3", False), ("fa3-planned", True)):
        try:
            found[name] = flash_calls(setting, batches, planned=planned and decode)
        except Exception as exc:  # noqa: BLE001  # no vLLM, or another of its versions
            say(f"  no {name}: {type(exc).__name__}: {exc}"[:300])
    return found


def differing(
    setting: Setting, batch: PagedBatch, calls: dict[str, Call], times: dict[str, float]
) -> dict[str, float]:
    """Of what ran: values whose bits are not the reference's; of FA3, the relative distance.

    These contexts are longer than those that certification draws.
    """
    our_calls(setting.shape, tree_of(setting.shape), [batch], [
        Launch(REFERENCE, 1, batch.max_query_len, 1)
    ])[0]()  # fmt: skip
    wanted = batch.out.clone()
    found: dict[str, float] = {}
    for name in times:
        batch.out.fill_(torch.nan)
        calls[name]()
        if name.startswith("fa3"):
            gap = (batch.out.float() - wanted.float()).norm() / wanted.float().norm()
            found[name] = float(gap)
        else:
            count = int((as_bits(batch.out) != as_bits(wanted)).sum())
            if count:
                found[name] = count
                say(f"  {name}: {count} values have OTHER BITS than the reference")
    return found


def measure(
    setting: Setting,
    admitted: tuple[AttentionSchedule, ...],
    requests: int,
    query: int,
    keys: int,
) -> dict[str, object]:
    """One case: microseconds of each contender, the best of ours and the ratio to FA3."""
    torch.cuda.empty_cache()
    batches = timing_batches(setting, requests, query, keys)
    failures: dict[str, str] = {}
    calls = contenders(setting, admitted, batches)
    times = medians(calls, failures)
    rivals = {name: t for name, t in times.items() if name.startswith("fa3")}
    ours = {name: t for name, t in times.items() if name not in rivals and name != "choice"}
    best = min(ours, key=lambda name: ours[name], default=None)
    rival = min(rivals.values(), default=None)
    case: dict[str, object] = {
        "case": f"{requests} x {query} of {keys}",
        "microseconds": times,
        "failures": failures,
        "other_bits": differing(setting, batches[0], {n: c[0] for n, c in calls.items()}, times),
        "best": best,
        "ratio_best": rival / ours[best] if rival and best else None,
        "ratio_choice": rival / times["choice"] if rival and "choice" in times else None,
    }
    say(f"{setting.name} {case['case']}: {_line(case, rival)}")
    return case


def _line(case: dict[str, object], rival: float | None) -> str:
    def number(value: object) -> str:
        return f"{value:.2f}" if isinstance(value, float) else "-"

    return (
        f"fa3 {number(rival)} us, ours/fa3 speed: choice {number(case['ratio_choice'])}, "
        f"best {number(case['ratio_best'])} by {case['best']}"
    )


TREES = [AttentionTree(c, t) for t in (64, 128) for c in (128, 256, 512)]
TREE_CASES = [(1, 1024, 1024), (1, 4096, 4096), (1, 1, 1024), (1, 1, 16384), (64, 1, 4096)]


def compare_trees() -> list[dict[str, object]]:
    """What the committed constants cost: the same schedules under other trees, on Llama's shape.

    Not a contest of schedules: a tree changes the bits, and a change of the rule is a decision.
    """
    setting = replace(settings()[0], name="llama-8b/block-128", block_size=128)
    found: list[dict[str, object]] = []
    for requests, query, keys in TREE_CASES:
        torch.cuda.empty_cache()
        batches = timing_batches(setting, requests, query, keys)
        rows = [(16, 4, 3)] if query == 1 else [(128, 8, 2), (128, 8, 3), (64, 4, 2)]
        calls: dict[str, list[Call]] = {}
        for tree in TREES:
            for (size, warps, stages), tma in itertools.product(rows, (False, True)):
                if tma and size < 64:
                    continue
                split = query == 1 and requests == 1
                schedule = AttentionSchedule(size, warps, stages, split=split, tma=tma)
                launch = [Launch(schedule, 1, query, 64 if split else 1)]
                name = f"{tree.chunk}/{tree.key_tile}/{schedule.name}"
                calls[name] = our_calls(setting.shape, tree, batches, launch)
        failures: dict[str, str] = {}
        times = medians(calls, failures)
        case = f"{requests} x {query} of {keys}"
        found.append({"case": case, "microseconds": times, "failures": failures})
        ranked = sorted(times, key=lambda name: times[name])[:4]
        say(f"trees, {case}: " + ", ".join(f"{n} {times[n]:.1f} us" for n in ranked))
    return found


def time_cases(
    setting: Setting,
    admitted: tuple[AttentionSchedule, ...],
    found: list[dict[str, object]],
    deadline: Deadline,
    keep: Call,
) -> None:
    """Every case of `setting` into `found`; `keep` saves the report after each."""
    for requests, query, keys in [(1, n, n) for n in PREFILLS] + [(b, 1, k) for b, k in DECODES]:
        if deadline.passed():
            say(f"{setting.name}: cut short, the budget is spent")
            return
        try:
            found.append(measure(setting, admitted, requests, query, keys))
        except Exception as exc:  # noqa: BLE001  # out of memory at 256 x 32k, say
            found.append({"case": f"{requests} x {query} of {keys}", "error": str(exc)[:500]})
            say(f"{setting.name} {requests} x {query} of {keys}: {exc}"[:300])
        keep()


def run(folder: Path, deadline: Deadline) -> dict[str, object]:
    """Shape by shape: compile, prove, time; the report so far is on disk after every case."""
    proofs: dict[str, object] = {}
    cases: dict[str, list[dict[str, object]]] = {}
    report: dict[str, object] = {"facts": facts(), "proofs": proofs, "cases": cases}
    for name in HEADS:
        if deadline.passed():
            say(f"{name}: left out, the budget is spent")
            continue
        chosen = [s for s in settings() if s.name.startswith(name + "/")]
        say(f"{name}: compiling")
        report[f"compile/{name}"] = failures = warm_all(chosen, deadline)
        for failure in failures:
            say(f"  {failure[:200]}")
        for setting in chosen:
            try:
                admitted = prove(setting, proofs)
            except Exception as exc:  # noqa: BLE001  # the next setting may still work
                proofs[setting.name] = f"{type(exc).__name__}: {exc}"[:1000]
                say(f"{setting.name}: FAILED {proofs[setting.name]}")
                continue
            if REFERENCE not in admitted:
                admitted = (REFERENCE, *admitted)
            found = cases.setdefault(setting.name, [])
            keep = partial(save, folder, "attention", report)
            time_cases(setting, admitted, found, deadline, keep)
        if "trees" not in report and not deadline.passed():
            try:
                report["trees"] = compare_trees()
            except Exception as exc:  # noqa: BLE001  # the report must still be written
                report["trees"] = f"{type(exc).__name__}: {exc}"[:1000]
                say(f"trees: FAILED {report['trees']}")
    return report


def table(report: dict[str, object]) -> str:
    """A line a case: ours over FA3 in speed."""
    lines = []
    cases = report["cases"]
    assert isinstance(cases, dict)
    for name, found in cases.items():
        for case in found:
            ratios = [case.get(key) for key in ("ratio_choice", "ratio_best")]
            text = "  ".join(f"{r:5.2f}" if isinstance(r, float) else "    -" for r in ratios)
            lines.append(f"{name:26} {case['case']:22} {text}  {case.get('best', '')}")
    return "\n".join(["shape, requests x queries of keys, speed over FA3: choice, best", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of attention.json")
    parser.add_argument("--budget", type=float, default=500, help="seconds")
    arguments = parser.parse_args()
    report = run(arguments.out, Deadline(arguments.budget))
    save(arguments.out, "attention", report)
    print(table(report), flush=True)


if __name__ == "__main__":
    main()
