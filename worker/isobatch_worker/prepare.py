"""Certifies a loaded model and installs what was admitted; the report says how it went.

Runs in the engine, once the weights are loaded. A refusal is reported, not raised: the API server
then answers 503 with the reason on every path, which says more than a worker that does not start.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from isobatch_contracts.numerics import Certified, NotCertified, OperatorSummary
from isobatch_kernels.attention import attention_operator
from isobatch_kernels.certification import CertificationRefused, Operator, certify
from isobatch_kernels.inputs import mixed_rows
from isobatch_kernels.noise import SAMPLER
from isobatch_kernels.plan import OperatorPlan, Plan, operator_plan, proof_of
from isobatch_kernels.rows import CertifiedRows, RowOperator, row_operator
from vllm import envs

from isobatch_worker import seams
from isobatch_worker.coverage import Covered, Shapes, cover
from isobatch_worker.cpu_attention import AttentionShape, paged_attention, shape_of
from isobatch_worker.engine_config import refusals
from isobatch_worker.environment import read_arithmetic, read_versions
from isobatch_worker.plan_cache import load_plan, plan_file, save_plan
from isobatch_worker.probe import compare_batches, probe_digest, reference_logits
from isobatch_worker.report import report_path, write_report
from isobatch_worker.sampler import (
    CertifiedSampling,
    Draw,
    StrictSampler,
    sampling_operators,
)

MODEL_DIGEST = "ISOBATCH_MODEL_DIGEST"
SETTINGS = "ISOBATCH_SETTINGS"
PLANS_FOLDER = "ISOBATCH_PLANS"
_SEED = 20260101  # of the inputs drawn; any constant will do, a constant keeps proofs repeatable

log = logging.getLogger("vllm.isobatch")


@dataclass(frozen=True, slots=True)
class _Work:
    """All that must be proved of one model."""

    covered: tuple[Covered, ...]
    sampling: list[RowOperator]
    attention: frozenset[AttentionShape]
    shapes: Shapes

    def operators(self) -> dict[tuple[str, str], Operator]:
        """By (operator, shape), each once."""
        rows = [c.operator for c in self.covered] + self.sampling
        found = {(o.name, o.shape): row_operator(o, _SEED) for o in rows}
        for shape in self.attention:
            operator = attention_operator(
                paged_attention(shape, self.shapes.max_positions, _SEED), _SEED
            )
            found[operator.name, operator.shape] = operator
        return found


class Certification:
    """The certification of one engine.

    `prepare` once the weights are loaded, `confirm` once the KV cache is there; what is refused in
    the first is not confirmed in the second.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._pending: _Prepared | None = None

    def prepare(self, runner: Any) -> None:
        """Certify the operators of `runner`'s model and install what was admitted."""
        with _refusals_reported():
            self._pending = _prepare(runner)

    def confirm(self, runner: Any) -> None:
        """Ask whether the whole model holds, and report the certificate."""
        prepared, self._pending = self._pending, None
        if prepared is None:
            return
        with _refusals_reported():
            certificate = _confirm(runner, prepared)
            write_report(report_path(), certificate)
            log.info(
                "certified %d operators in %.1f s (cached: %s): %s",
                len(certificate.operators),
                certificate.certification_seconds,
                certificate.from_cache,
                certificate.fingerprint,
            )


@dataclass(frozen=True, slots=True)
class _Prepared:
    plan: Plan
    path: Path
    from_cache: bool
    rows: list[CertifiedRows]
    seconds: float


@contextmanager
def _refusals_reported() -> Iterator[None]:
    try:
        yield
    except CertificationRefused as refusal:
        report_refusal(refusal)


def report_refusal(refusal: CertificationRefused) -> None:
    """Say that this worker may not serve strict requests, and why."""
    log.error("strict is refused: %s", refusal)
    write_report(report_path(), NotCertified(state="refused", reason=str(refusal)))


def _prepare(runner: Any) -> _Prepared:
    started = time.monotonic()
    seams.check()
    if envs.VLLM_CPU_ATTN_SPLIT_KV:
        raise CertificationRefused(
            "VLLM_CPU_ATTN_SPLIT_KV must be 0: the split moves with the batch"
        )
    refused = refusals(runner.vllm_config)
    if refused:
        raise CertificationRefused(f"this configuration is not certified: {'; '.join(refused)}")
    work = _find_work(runner)
    wanted = Plan(
        model_digest=os.environ[MODEL_DIGEST],
        settings=os.environ[SETTINGS],
        arithmetic=read_arithmetic(),
        versions=read_versions(),
        sampler=SAMPLER,
        dtype=str(work.shapes.dtype),
        operators=(),
    )
    path = plan_file(Path(os.environ[PLANS_FOLDER]), wanted)
    plan, from_cache = _plan(work, wanted, path)
    rows = _install(runner, work, plan)
    return _Prepared(plan, path, from_cache, rows, time.monotonic() - started)


def _confirm(runner: Any, prepared: _Prepared) -> Certified:
    started = time.monotonic()
    logits = reference_logits(runner, prepared.rows)
    digest = probe_digest(logits)
    plan = prepared.plan
    if not prepared.from_cache:
        compare_batches(runner, logits)
        plan = plan.model_copy(update={"probe": digest})
        save_plan(prepared.path, plan)
    elif plan.probe != digest:
        prepared.path.unlink(missing_ok=True)
        raise CertificationRefused(
            "the probe prompts no longer have the logits that the kept plan was made with; the "
            "plan is dropped: start again to certify anew"
        )
    seconds = prepared.seconds + time.monotonic() - started
    return _summary(plan, from_cache=prepared.from_cache, seconds=seconds)


def _find_work(runner: Any) -> _Work:
    config = runner.vllm_config
    model, parallel, scheduler = (
        config.model_config,
        config.parallel_config,
        config.scheduler_config,
    )
    text = model.hf_text_config
    shapes = Shapes(
        dtype=model.dtype,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size // parallel.tensor_parallel_size,
        heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        max_tokens=scheduler.max_num_batched_tokens,
        max_positions=model.max_model_len,
    )
    vocabulary = model.get_vocab_size()
    impls = [m.impl for m in runner.model.modules() if type(m).__name__ == "Attention"]
    return _Work(
        covered=cover(runner.model, shapes, _linear),
        sampling=sampling_operators(vocabulary, model.dtype, scheduler.max_num_seqs),
        attention=frozenset(
            shape_of(impl, config.cache_config.block_size, model.dtype) for impl in impls
        ),
        shapes=shapes,
    )


def _linear(module: torch.nn.Module, shapes: Shapes) -> RowOperator | None:
    """The linear that `module` computes, on drawn weights of its shape; None if it is no linear."""
    found = getattr(module, seams.LINEAR_SHAPE, None)
    if found is None or type(module).__name__ == "VocabParallelEmbedding":
        return None
    rows, columns, dtype = found
    library: list[Callable[..., torch.Tensor]] = []

    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        if not library:  # packed at the first proof only: a cached plan needs none
            library.append(seams.library_linear(_weights(rows, columns, dtype)))
        return (library[0](x, None),)

    def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor]:
        return (mixed_rows(count, columns, dtype, generator),)

    # An LM head is called with one row a request; more (prompt logprobs) runs as blocks.
    is_head = type(module).__name__ == "ParallelLMHead"
    most = min(64, shapes.max_tokens) if is_head else shapes.max_tokens
    return RowOperator("linear", f"{rows}x{columns} {dtype}", run, draw, most)


def _weights(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns]: a third each constant (paired inputs cancel), wide-range, and normal."""
    generator = torch.Generator().manual_seed(_SEED)
    weight = torch.randn(rows, columns, generator=generator)
    weight[0::3] = torch.sign(weight[0::3, :1]).expand(-1, columns)
    weight[1::3] *= torch.exp(2 * torch.randn(weight[1::3].shape, generator=generator))
    return weight.to(dtype)


def _plan(work: _Work, wanted: Plan, path: Path) -> tuple[Plan, bool]:
    operators = work.operators()
    keys = {(o.name, o.shape, o.tree) for o in operators.values()}
    kept = load_plan(path, wanted, keys)
    if kept is not None:
        return kept, True
    proofs = []
    for done, operator in enumerate(operators.values()):
        reason = f"certifying {operator.name} {operator.shape} ({done + 1} of {len(operators)})"
        write_report(report_path(), NotCertified(state="certifying", reason=reason))
        log.info("%s", reason)
        proofs.append(operator_plan(certify(operator)))
    return wanted.model_copy(update={"operators": tuple(proofs)}), False


def _install(runner: Any, work: _Work, plan: Plan) -> list[CertifiedRows]:
    """Exchange what was certified; returns every operator that now serves."""
    serving: list[CertifiedRows] = []
    plans = {(o.operator, o.shape): o for o in plan.operators}
    by_module: dict[torch.nn.Module, list[tuple[Covered, OperatorPlan]]] = {}
    for covered in work.covered:
        proved = plans[covered.operator.name, covered.operator.shape]
        if covered.kind == "linear":
            serving.append(_install_linear(covered, proved))
        else:
            by_module.setdefault(covered.module, []).append((covered, proved))
    for module, operators in by_module.items():
        serving += _install_rows(module, operators)
    if any(not o.admitted["batched"] for o in plan.operators if o.operator == "attention"):
        seams.split_attention_by_token()
    certified = {
        o.name: CertifiedRows(o.function, proof_of(plans[o.name, o.shape]), o.block_rows)
        for o in work.sampling
    }
    sampling = CertifiedSampling(
        **{name.replace("-", "_"): rows for name, rows in certified.items()}
    )
    seams.filter_by_min_p(sampling.filter_by_min_p)
    runner.sampler = StrictSampler(
        lambda rows: _draws(runner, rows), sampling, runner.model_config.logprobs_mode
    )
    return [*serving, *certified.values()]


def _install_linear(covered: Covered, proved: OperatorPlan) -> CertifiedRows:
    module: Any = covered.module
    library = module.cpu_linear
    weight = module.weight
    # The bias is added apart: what was proved has none, and a fused one may take another kernel.
    blocks = covered.operator.block_rows
    rows = CertifiedRows(lambda x: (library(x, weight, None),), proof_of(proved), blocks)

    def linear(x: torch.Tensor, _weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        (y,) = rows(x.reshape(-1, x.shape[-1]))
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias

    module.cpu_linear = linear
    return rows


def _install_rows(
    module: torch.nn.Module, operators: list[tuple[Covered, OperatorPlan]]
) -> list[CertifiedRows]:
    """Exchange the module's forward; which of its operators runs follows from the inputs given."""
    by_arity = {
        c.arity: CertifiedRows(c.operator.function, proof_of(proved), c.operator.block_rows)
        for c, proved in operators
    }

    def forward(*inputs: torch.Tensor | None, **named: torch.Tensor | None) -> Any:
        given = tuple(x for x in (*inputs, *named.values()) if x is not None)
        rows = by_arity.get(len(given))
        if rows is None:
            raise RuntimeError(
                f"{type(module).__name__} was called with {len(given)} tensors; certified are "
                f"{sorted(by_arity)}"
            )
        got = rows(*given)
        return got if len(got) > 1 else got[0]

    module.forward = forward
    return list(by_arity.values())


def _draws(runner: Any, rows: int) -> list[Draw]:
    """Seed and position of each row; rows beyond the batch belong to vLLM's warm-up.

    The position is the number of tokens known, prompt included: the index of the one to be drawn.
    """
    batch = runner.input_batch
    draws = []
    for row in range(rows):
        if row >= batch.num_reqs:
            draws.append(Draw(seed=0, position=0))
            continue
        request = batch.req_ids[row]
        params = runner.requests[request].sampling_params
        greedy = params.temperature < 1e-5
        seed = None if greedy else _seed(params.seed, request)
        draws.append(Draw(seed=seed, position=int(batch.num_tokens_no_spec[row])))
    return draws


def _seed(given: int | None, request: str) -> int:
    """The request's seed; one without is drawn from its id, so that it is stable for its life."""
    if given is not None:
        return given
    return int.from_bytes(request.encode()[-8:].rjust(8, b"\0"), "big") >> 11


def _summary(plan: Plan, *, from_cache: bool, seconds: float) -> Certified:
    return Certified(
        fingerprint=plan.fingerprint,
        model_digest=plan.model_digest,
        device=plan.arithmetic.device,
        versions=plan.versions,
        operators=tuple(
            OperatorSummary(
                operator=o.operator,
                shape=o.shape,
                reference=o.tree,
                admitted=tuple(name for name, at in o.admitted.items() if at),
                refused=tuple(f"{name}: {why}" for name, why in o.refused.items()),
                comparisons=o.comparisons,
            )
            for o in plan.operators
        ),
        from_cache=from_cache,
        certification_seconds=round(seconds, 3),
    )
