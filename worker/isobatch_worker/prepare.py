"""Performs: certifies the operators of a model loaded on a CPU, and installs what was admitted."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from isobatch_kernels.attention import WHOLE_TO, attention_operator, schedule_name
from isobatch_kernels.certification import CertificationRefused, Operator
from isobatch_kernels.inputs import mixed_rows
from isobatch_kernels.noise import SAMPLER
from isobatch_kernels.plan import OperatorPlan, Plan, proof_of
from isobatch_kernels.rows import CertifiedRows, RowOperator, row_operator
from vllm import envs

from isobatch_worker import seams
from isobatch_worker.certificate import (
    SEED,
    Certification,
    Prepared,
    prove,
    subject_of,
    wanted_plan,
)
from isobatch_worker.coverage import Covered, Shapes, cover
from isobatch_worker.cpu_attention import AttentionShape, paged_attention, shape_of
from isobatch_worker.engine_config import On, refusals
from isobatch_worker.environment import cpu_arithmetic
from isobatch_worker.probe import V1Runner
from isobatch_worker.sampler import (
    SamplingShape,
    install_sampler,
    sampling_operators,
)
from isobatch_worker.seam_list import ON_CPU


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
        found = {(o.name, o.shape): row_operator(o, SEED) for o in rows}
        for shape in self.attention:
            operator = attention_operator(
                paged_attention(shape, self.shapes.max_positions, SEED), SEED
            )
            found[operator.name, operator.shape] = operator
        return found


def install() -> None:
    """Put the strict pool into vLLM. Raises `SeamsChanged` for one not read. Idempotent."""
    seams.check(ON_CPU)
    certification = Certification(prepare)
    seams.install_on_cpu(certification.prepare, certification.confirm)


def prepare(runner: Any) -> Prepared:
    """Certify the operators of `runner`'s model, or refuse it by `CertificationRefused`."""
    started = time.monotonic()
    if envs.VLLM_CPU_ATTN_SPLIT_KV:
        raise CertificationRefused(
            "VLLM_CPU_ATTN_SPLIT_KV must be 0: the split moves with the batch"
        )
    refused = refusals(runner.vllm_config, On.CPU)
    if refused:
        raise CertificationRefused(f"this configuration is not certified: {'; '.join(refused)}")
    work = _find_work(runner)
    subjects = [subject_of(operator) for operator in work.operators().values()]
    plan, path, from_cache = prove(
        subjects, wanted_plan(cpu_arithmetic(), SAMPLER, str(work.shapes.dtype))
    )
    serving = _install(runner, work, plan)
    return Prepared(plan, path, from_cache, [*serving], V1Runner(), time.monotonic() - started)


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
    sampled = SamplingShape(model.get_vocab_size(), model.dtype, scheduler.max_num_seqs)
    impls = [m.impl for m in runner.model.modules() if type(m).__name__ == "Attention"]
    return _Work(
        covered=cover(runner.model, shapes, _linear),
        sampling=sampling_operators(sampled),
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
    # An LM head is called with one row a request; more (prompt logprobs) runs as blocks.
    is_head = type(module).__name__ == "ParallelLMHead"
    most = min(64, shapes.max_tokens) if is_head else shapes.max_tokens
    n, k, dtype = found
    return library_rows(n, k, dtype, most)


def library_rows(n: int, k: int, dtype: torch.dtype, max_rows: int) -> RowOperator:
    """VLLM's CPU linear on drawn weights [n, k], for up to `max_rows` rows."""
    library: list[Callable[..., torch.Tensor]] = []

    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        if not library:  # packed at the first proof only: a cached plan needs none
            library.append(seams.library_linear(_weights(n, k, dtype)))
        return (library[0](x, None),)

    def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor]:
        return (mixed_rows(count, k, dtype, generator),)

    return RowOperator("linear", f"{n}x{k} {dtype}", run, draw, max_rows)


def _weights(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns]: a third each constant (paired inputs cancel), wide-range, and normal."""
    generator = torch.Generator().manual_seed(SEED)
    weight = torch.randn(rows, columns, generator=generator)
    weight[0::3] = torch.sign(weight[0::3, :1]).expand(-1, columns)
    weight[1::3] *= torch.exp(2 * torch.randn(weight[1::3].shape, generator=generator))
    return weight.to(dtype)


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
    seams.split_attention(
        min(map(_whole_to, (plans[key] for key in plans if key[0] == "attention")))
    )
    serving += install_sampler(runner, work.sampling, plans)
    return serving


def _whole_to(attention: OperatorPlan) -> int:
    """The length to which requests may stay whole; the reference by token is always admitted."""
    return next(most for most in WHOLE_TO if attention.admitted.get(schedule_name(most)))


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
