"""Performs fixed prompts through the whole loaded model, past vLLM's scheduler.

Certification proves operators one by one; this asks whether the model made of them holds: the
logits with every operator on its reference, against the same prompts alone, among each other and
in chunks, the last token by itself, with the schedules that will serve. What a model does between
its layers is covered by nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from isobatch_kernels.bits import bits_digest, same_bits
from isobatch_kernels.certification import CertificationRefused
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

LENGTHS = (3, 17, 40)
"""Tokens of the prompts: constants, since the digest is part of the fingerprint."""

Chunks = Mapping[int, tuple[int, int]]
"""Prompt -> (first token, tokens) of one step."""


class HasReference(Protocol):
    """An operator as it serves, that can be held to its reference."""

    reference_only: bool


class RunnerKind(Protocol):
    """How the probe reads one of vLLM's two model runners."""

    def logits(self, runner: Any) -> dict[str, torch.Tensor]:
        """[V] logits of each request of the step that `runner` has just executed."""

    def without_graphs(self, runner: Any) -> AbstractContextManager[None]:
        """`runner` replays no captured graph within the block."""


class V1Runner:
    """`vllm.v1.worker.gpu_model_runner`, and the CPU's, which is one."""

    def logits(self, runner: Any) -> dict[str, torch.Tensor]:  # of a protocol
        """As the protocol says."""
        logits = runner.execute_model_state.logits.clone()
        return dict(zip(runner.input_batch.req_ids, logits, strict=True))

    @contextmanager
    def without_graphs(self, runner: Any) -> Iterator[None]:  # as above
        """As the protocol says."""
        dispatcher = runner.cudagraph_dispatcher
        has_graphs, dispatcher.keys_initialized = dispatcher.keys_initialized, False
        try:
            yield
        finally:
            dispatcher.keys_initialized = has_graphs


class V2Runner:
    """`vllm.v1.worker.gpu.model_runner`."""

    def logits(self, runner: Any) -> dict[str, torch.Tensor]:  # as above
        """As the protocol says."""
        state = runner.execute_model_state
        batch = state.input_batch
        logits = runner.model.compute_logits(state.hidden_states[batch.logits_indices])
        return dict(zip(batch.req_ids, logits, strict=True))

    @contextmanager
    def without_graphs(self, runner: Any) -> Iterator[None]:  # as above
        """As the protocol says."""
        manager = runner.cudagraph_manager
        has_graphs, manager._graphs_captured = manager._graphs_captured, False
        try:
            yield
        finally:
            manager._graphs_captured = has_graphs


@contextmanager
def on_reference(kind: RunnerKind, runner: Any, serving: list[HasReference]) -> Iterator[None]:
    """Every one of `serving` runs as its reference within the block, in no graph of `runner`."""
    for one in serving:
        one.reference_only = True
    try:
        with kind.without_graphs(runner):
            yield
    finally:
        for one in serving:
            one.reference_only = False


def reference_logits(
    kind: RunnerKind, runner: Any, serving: list[HasReference]
) -> list[torch.Tensor]:
    """[V] logits of each prompt, in one step, every one of `serving` on its reference.

    Raises `CertificationRefused` if the worker is too small for the prompts.
    """
    _require_room(runner)
    together = {n: (0, length) for n, length in enumerate(LENGTHS)}
    with torch.inference_mode(), on_reference(kind, runner, serving):
        return _Prompts(kind, runner).logits_of(list(together), [together])


def probe_digest(logits: list[torch.Tensor]) -> str:
    """`sha256:…` of `reference_logits`."""
    return bits_digest(logits)


def compare_batches(kind: RunnerKind, runner: Any, wanted: list[torch.Tensor]) -> None:
    """Raise `CertificationRefused` if a prompt has other bits alone, among others or in chunks."""
    prompts = _Prompts(kind, runner)
    whole = {n: (0, length) for n, length in enumerate(LENGTHS)}
    with torch.inference_mode():
        for n, got in enumerate(prompts.logits_of(list(whole), [whole])):
            _compare("among the others", wanted[n], got)
        for n, length in enumerate(LENGTHS):
            (alone,) = prompts.logits_of([n], [{n: whole[n]}])
            _compare("alone", wanted[n], alone)
            last = length - 1
            chunked: list[Chunks] = [{n: (0, last)}, {**whole, n: (last, 1)}]
            (got,) = prompts.logits_of([n], chunked)
            _compare("in two chunks", wanted[n], got)


def _require_room(runner: Any) -> None:
    scheduler, needed = runner.scheduler_config, sum(LENGTHS)
    limits = {
        "--max-num-batched-tokens": (scheduler.max_num_batched_tokens, needed),
        "--max-num-seqs": (scheduler.max_num_seqs, len(LENGTHS)),
        "--max-model-len": (runner.max_model_len, max(LENGTHS) + 1),
        "KV cache blocks": (runner.kv_cache_config.num_blocks, _Prompts.blocks_needed(runner) + 1),
    }
    small = [
        f"{name} is {has}, needs {least}" for name, (has, least) in limits.items() if has < least
    ]
    if small:
        raise CertificationRefused(f"too small for the probe prompts: {'; '.join(small)}")


def _compare(how: str, wanted: torch.Tensor, got: torch.Tensor) -> None:
    if not same_bits(wanted, got):
        different = int((wanted != got).sum())
        raise CertificationRefused(
            f"the whole model is not independent of the batch: a probe prompt {how} has "
            f"{different} other logits than the reference; some layer does more than was certified"
        )


class _Prompts:
    """The fixed prompts in a runner whose cache nobody else uses yet."""

    def __init__(self, kind: RunnerKind, runner: Any) -> None:
        self._kind = kind
        self._runner = runner
        vocabulary = runner.model_config.get_vocab_size()
        self._tokens = [
            [(7919 * (n + 1) * (i + 3) + 104729) % vocabulary for i in range(length)]
            for n, length in enumerate(LENGTHS)
        ]
        block = runner.cache_config.block_size
        starts = [1]  # block 0 is vLLM's null block
        for length in LENGTHS:
            starts.append(starts[-1] + -(-length // block))
        self._blocks = [list(range(a, b)) for a, b in pairwise(starts)]

    @staticmethod
    def blocks_needed(runner: Any) -> int:
        """Cache blocks that the prompts fill."""
        return sum(-(-length // runner.cache_config.block_size) for length in LENGTHS)

    def logits_of(self, wanted: Sequence[int], steps: Sequence[Chunks]) -> list[torch.Tensor]:
        """[V] logits of each prompt `wanted` in the last of `steps`, run one after another."""
        logits: dict[str, torch.Tensor] = {}
        known: set[int] = set()
        for step in steps:
            logits = self._run(step, known)
            known |= step.keys()
        self._finish(known)
        return [logits[_name(n)] for n in wanted]

    def _run(self, step: Chunks, known: set[int]) -> dict[str, torch.Tensor]:
        runner = self._runner
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {_name(n): count for n, (_, count) in step.items()}
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.num_common_prefix_blocks = [0] * len(runner.kv_cache_config.kv_cache_groups)
        output.scheduled_new_reqs = [self._new(n) for n in step if n not in known]
        output.scheduled_cached_reqs = _cached({n: at for n, (at, _) in step.items() if n in known})
        if runner.execute_model(output) is not None:
            raise CertificationRefused("vLLM's runner answered a probe without logits")
        logits = self._kind.logits(runner)
        runner.sample_tokens(None)
        return logits

    def _new(self, n: int) -> NewRequestData:
        groups = len(self._runner.kv_cache_config.kv_cache_groups)
        return NewRequestData(
            req_id=_name(n),
            prompt_token_ids=self._tokens[n],
            prefill_token_ids=self._tokens[n],
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
            pooling_params=None,
            block_ids=(self._blocks[n],) * groups,
            num_computed_tokens=0,
            lora_request=None,
        )

    def _finish(self, known: set[int]) -> None:
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {_name(n) for n in known}
        self._runner.execute_model(output)


def _name(prompt: int) -> str:
    return f"isobatch-probe-{prompt}"


def _cached(computed: Mapping[int, int]) -> CachedRequestData:
    """Requests that go on; `computed` maps each to the tokens it has in the cache."""
    cached = CachedRequestData.make_empty()
    for prompt, tokens in computed.items():
        cached.req_ids.append(_name(prompt))
        cached.new_block_ids.append(None)
        cached.num_computed_tokens.append(tokens)
        cached.num_output_tokens.append(0)
    return cached
