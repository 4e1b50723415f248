"""Performs: certifies the operators of a model loaded on a card, and installs what was admitted."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from isobatch_kernels.attention_plan import (
    admitted_schedules,
    plan_attention,
    reprove_attention,
)
from isobatch_kernels.attention_tree import AttentionShape, tree_of
from isobatch_kernels.certification import CertificationRefused, Operator
from isobatch_kernels.linear_plan import LinearShape, choice_of, plan_linear, reprove_linear
from isobatch_kernels.matmul_schedules import CertifiedLinear
from isobatch_kernels.paged_attention import AttentionLauncher, Workspace, allocate_workspace
from isobatch_kernels.plan import Plan
from isobatch_kernels.tree import family_of, linear_tree
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from isobatch_worker import seams
from isobatch_worker.certificate import (
    SEED,
    Certification,
    Prepared,
    Subject,
    lone_subject,
    prove,
    wanted_plan,
)
from isobatch_worker.cuda.attention import StrictAttentionBackend
from isobatch_worker.cuda.coverage import Found, cover
from isobatch_worker.cuda.layers import register_layers
from isobatch_worker.cuda.operators import LINEARS, register_operators
from isobatch_worker.cuda.rows import layer_operators
from isobatch_worker.cuda.sampling import SAMPLER, install_sampler, sampling_operators
from isobatch_worker.engine_config import On, refusals
from isobatch_worker.environment import cuda_arithmetic
from isobatch_worker.probe import HasReference, V2Runner
from isobatch_worker.sampler import SamplingShape
from isobatch_worker.seam_list import ON_CUDA


def install() -> None:
    """Put the strict pool into vLLM. Raises `SeamsChanged` for one not read. Idempotent."""
    seams.check(ON_CUDA)
    register_operators()
    register_layers()
    register_backend(
        AttentionBackendEnum.CUSTOM,
        f"{StrictAttentionBackend.__module__}.{StrictAttentionBackend.__qualname__}",
    )
    certification = Certification(prepare)
    seams.install_on_cuda(_linear, certification.prepare, certification.confirm)


def _linear(
    _layer: torch.nn.Module,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.isobatch.linear(x, weight, bias)
    return y


def prepare(runner: Any) -> Prepared:
    """Certify the operators of `runner`'s model, or refuse it by `CertificationRefused`."""
    started = time.monotonic()
    refused = refusals(runner.vllm_config, On.CUDA)
    if refused:
        raise CertificationRefused(f"this configuration is not certified: {'; '.join(refused)}")
    work = _find_work(runner)
    plan, path, from_cache = prove(
        work.subjects(),
        wanted_plan(cuda_arithmetic(work.device), SAMPLER, str(work.sampled.dtype)),
    )
    serving = _install(runner, work, plan)
    torch.cuda.empty_cache()  # vLLM measures next what is left for the KV cache
    return Prepared(plan, path, from_cache, serving, V2Runner(), time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Work:
    """All that must be proved of one model."""

    found: Found
    rows: list[Operator]  # of layers and sampler: one kernel each
    sampled: SamplingShape
    attentions: dict[AttentionShape, list[Any]]
    block_size: int
    longest: int
    device: torch.device

    def subjects(self) -> list[Subject]:
        """Each operator once."""
        return [
            *(linear_subject(shape, self.device) for shape in self.found.linears.values()),
            *(attention_subject(s, self.block_size, self.device) for s in self.attentions),
            *map(lone_subject, self.rows),
        ]


def linear_subject(shape: LinearShape, device: torch.device) -> Subject:
    """A linear, by all schedules of its tree."""
    family = family_of(torch.cuda.get_device_capability(device))
    tree = linear_tree(shape.n, shape.k, shape.dtype, family)
    return Subject(
        ("linear", shape.name, tree.name),
        partial(plan_linear, shape, device, SEED),
        lambda plan: reprove_linear(plan, shape, device, SEED),
    )


def attention_subject(shape: AttentionShape, block_size: int, device: torch.device) -> Subject:
    """Paged attention in blocks of `block_size` slots, by all schedules of its tree."""
    return Subject(
        ("attention", shape.name, tree_of(shape).name),
        partial(plan_attention, shape, block_size, device, SEED),
        lambda plan: reprove_attention(plan, shape, block_size, device, SEED),
    )


def _find_work(runner: Any) -> _Work:
    config = runner.vllm_config
    model, scheduler = config.model_config, config.scheduler_config
    found = cover(runner.get_model(), scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    attentions: dict[AttentionShape, list[Any]] = {}
    for impl in found.attentions:
        attentions.setdefault(impl.shape(model.dtype), []).append(impl)
    sampled = SamplingShape(model.get_vocab_size(), model.dtype, scheduler.max_num_seqs)
    return _Work(
        found=found,
        rows=[
            *layer_operators(
                found, model.dtype, model.hf_text_config.intermediate_size, runner.device, SEED
            ),
            *sampling_operators(sampled, runner.device, SEED),
        ],
        sampled=sampled,
        attentions=attentions,
        block_size=_block_size(config.cache_config),
        longest=model.max_model_len,
        device=runner.device,
    )


def _block_size(cache: Any) -> int:
    """Slots of the blocks that will be served: vLLM asks the backend only after the weights."""
    if cache.user_specified_block_size:
        return int(cache.block_size)
    return int(StrictAttentionBackend.get_preferred_block_size(cache.DEFAULT_BLOCK_SIZE))


def _install(runner: Any, work: _Work, plan: Plan) -> list[HasReference]:
    """Give linears, attention and the sampler what was admitted; returns all that now serves."""
    plans = {(o.operator, o.shape): o for o in plan.operators}
    serving: list[HasReference] = []
    for weights in work.found.linears.values():
        linear = CertifiedLinear(choice_of(plans["linear", weights.name]))
        LINEARS.admit(weights, linear)
        serving.append(linear)
    multiprocessors = torch.cuda.get_device_properties(work.device).multi_processor_count
    workspace = _workspace(work)
    for shape, impls in work.attentions.items():
        admitted = admitted_schedules(plans["attention", shape.name], shape, work.block_size)
        launcher = AttentionLauncher(shape, admitted, workspace, multiprocessors, work.block_size)
        serving.append(launcher)
        for impl in impls:
            impl.launcher = launcher
    install_sampler(runner)
    return serving


def _workspace(work: _Work) -> Workspace:
    """One for all shapes of attention: one layer runs at a time."""
    each = [
        allocate_workspace(shape, work.sampled.max_rows, work.longest, work.device)
        for shape in work.attentions
    ]
    return Workspace(
        floats=max((w.floats for w in each), key=torch.Tensor.numel),
        tickets=max((w.tickets for w in each), key=torch.Tensor.numel),
    )
