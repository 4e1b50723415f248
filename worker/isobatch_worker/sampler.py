"""Performs sampling on a CPU: rows certified, noise from (seed, position) alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from isobatch_kernels.certification import Tensors
from isobatch_kernels.inputs import mixed_rows
from isobatch_kernels.noise import exponential_noise
from isobatch_kernels.plan import OperatorPlan, proof_of
from isobatch_kernels.rows import CertifiedRows, RowFunction, RowOperator
from isobatch_kernels.rows import Draw as Draws
from vllm.model_executor.layers.utils import apply_penalties
from vllm.utils.torch_utils import make_tensor_with_pad
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from isobatch_worker import seams

_SAMPLING_EPS = 1e-5  # vLLM's: below it a request is greedy


@dataclass(frozen=True, slots=True)
class Draw:
    """What a row of the batch samples with; `seed` None means greedy."""

    seed: int | None
    position: int


Rows = Callable[[int], list[Draw]]
"""(rows of the batch) -> one `Draw` each, in the batch's order."""


_BLOCK_ROWS = 8
"""Rows of a reference block: a step samples a row a request, and each is a vocabulary wide."""

_FEW = 8
"""Rows that ask for a filter, proved one by one; more run as blocks."""


@dataclass(frozen=True, slots=True)
class SamplingShape:
    """What the sampler is given: logits [rows, vocabulary] of `dtype`, up to `max_rows`."""

    vocabulary: int
    dtype: torch.dtype
    max_rows: int


def sampling_operators(shape: SamplingShape) -> list[RowOperator]:
    """The row-wise operators of the sampler, for certification."""
    vocabulary, dtype = shape.vocabulary, shape.dtype

    def logits(rows: int, generator: torch.Generator) -> Tensors:
        return (4 * mixed_rows(rows, vocabulary, dtype, generator),)

    def floats(rows: int, generator: torch.Generator) -> Tensors:
        return (4 * mixed_rows(rows, vocabulary, dtype, generator).float(),)

    def plain(rows: int, generator: torch.Generator) -> torch.Tensor:
        return 4 * torch.randn(rows, vocabulary, generator=generator).to(dtype).float()

    def filtered(rows: int, generator: torch.Generator) -> Tensors:
        k = torch.randint(1, vocabulary + 1, (rows,), generator=generator, dtype=torch.int32)
        k[::2] = vocabulary
        p = torch.rand(rows, generator=generator)
        p[1::3] = 1.0
        return plain(rows, generator), k, p

    def with_share(rows: int, generator: torch.Generator) -> Tensors:
        return plain(rows, generator), torch.rand(rows, generator=generator)

    def with_temperature(rows: int, generator: torch.Generator) -> Tensors:
        return *floats(rows, generator), 0.05 + 2 * torch.rand(rows, generator=generator)

    def penalized(rows: int, generator: torch.Generator) -> Tensors:
        known = torch.randint(0, vocabulary + 1, (2, rows, 64), generator=generator)
        presence, frequency = 4 * torch.rand(2, rows, generator=generator) - 2
        repetition = 0.5 + torch.rand(rows, generator=generator)
        return *floats(rows, generator), known[0], known[1], presence, frequency, repetition

    most, few = shape.max_rows, min(shape.max_rows, _FEW)
    described: tuple[tuple[str, RowFunction, Draws, int], ...] = (
        ("log-softmax", _log_softmax, logits, most),
        ("argmax", _argmax, floats, most),
        ("softmax", _softmax, floats, most),
        ("temperature", _temperature, with_temperature, most),
        ("top-k-top-p", _filter, filtered, few),
        ("min-p", _min_p, with_share, few),
        ("penalties", _penalties, penalized, few),
    )
    name = f"vocabulary={vocabulary} {dtype}"
    return [
        RowOperator(operator, name, function, draw, rows, _BLOCK_ROWS)
        for operator, function, draw, rows in described
    ]


def _log_softmax(x: torch.Tensor) -> Tensors:
    return (Sampler.compute_logprobs(x),)


def _softmax(x: torch.Tensor) -> Tensors:
    return (x.softmax(dim=-1, dtype=torch.float32),)


def _argmax(x: torch.Tensor) -> Tensors:
    return (x.argmax(dim=-1).view(-1),)


def _temperature(x: torch.Tensor, temperature: torch.Tensor) -> Tensors:
    return (x / temperature.unsqueeze(1),)


def _filter(x: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Tensors:
    return (apply_top_k_top_p(x, k, p),)


def _min_p(x: torch.Tensor, share: torch.Tensor) -> Tensors:
    """Logits whose probability is below `share` [M] of the row's largest become -inf."""
    probabilities = x.softmax(dim=-1)
    least = probabilities.amax(dim=-1, keepdim=True) * share.unsqueeze(1)
    return (x.masked_fill(probabilities < least, float("-inf")),)


def _penalties(x: torch.Tensor, *known_and_penalties: torch.Tensor) -> Tensors:
    return (apply_penalties(x, *known_and_penalties),)


@dataclass(frozen=True, slots=True)
class CertifiedSampling:
    """The sampler's operators as they serve. A filter reaches only the rows that ask for it."""

    log_softmax: CertifiedRows
    argmax: CertifiedRows
    softmax: CertifiedRows
    temperature: CertifiedRows
    top_k_top_p: CertifiedRows
    min_p: CertifiedRows
    penalties: CertifiedRows

    def filter_by_min_p(self, logits: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """`logits` [B, V], altered in the rows whose `share` [B] is not 0."""
        return _for_rows(share > 0, self.min_p, logits, share)


def _for_rows(
    asked: torch.Tensor, operator: CertifiedRows, logits: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """`logits` [B, V] with `operator` applied in place to the rows of `asked` [B], no other."""
    rows = asked.nonzero().view(-1)
    if len(rows):
        (logits[rows],) = operator(logits[rows], *(x[rows] for x in others))
    return logits


def asked_of_filters(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k [B], p [B], asked [B]) for `logits` [B, V]; who asks for neither has k = V and p = 1."""
    rows, vocabulary = logits.shape
    if k is None:
        k = torch.full((rows,), vocabulary, dtype=torch.int32, device=logits.device)
    if p is None:
        p = torch.ones(rows, device=logits.device)
    return k, p, (k < vocabulary) | (p < 1.0)


class PositionalSampler(torch.nn.Module):
    """Samples each row by an exponential race whose noise is a function of (seed, position).

    Stands where vLLM's TopKTopPSampler does: (logits [B, V] float32, generators, k [B], p [B]) ->
    (token ids [B], None). The generators are not used: they have a history.
    """

    def __init__(self, rows: Rows, operators: CertifiedSampling) -> None:
        """`rows` tells seed and position of each row of the batch."""
        super().__init__()
        self._rows = rows
        self._operators = operators

    def forward(
        self,
        logits: torch.Tensor,
        _generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, None]:
        """Token ids [B] for `logits` [B, V], which may be altered."""
        logits = self._filtered(logits, k, p)
        (probabilities,) = self._operators.softmax(logits)
        _race(probabilities, self._rows(logits.shape[0]))
        return self._operators.argmax(probabilities)[0], None

    def _filtered(
        self, logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> torch.Tensor:
        """Filter only the rows that ask for it, so that a neighbour's filter reaches no other."""
        if k is None and p is None:
            return logits
        k, p, asked = asked_of_filters(logits, k, p)
        return _for_rows(asked, self._operators.top_k_top_p, logits, k, p)


def _race(probabilities: torch.Tensor, draws: list[Draw]) -> None:
    """Divide every row [V] of `probabilities` that samples by its noise, in place."""
    for row, draw in enumerate(draws):
        if draw.seed is not None:
            noise = exponential_noise(draw.seed, draw.position, probabilities.shape[1])
            probabilities[row].div_(noise)


class StrictSampler(Sampler):  # type: ignore[misc]  # vLLM is not followed by mypy
    """vLLM's sampler with certified operators, stateless noise and ties broken by token id."""

    def __init__(self, rows: Rows, operators: CertifiedSampling, logprobs_mode: Any) -> None:
        """Build it as vLLM does, then exchange what depends on the batch or on history."""
        super().__init__(logprobs_mode)
        self._operators = operators
        self.topk_topp_sampler = PositionalSampler(rows, operators)

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-softmax [M, V] float32 of `logits` [M, V]."""
        return self._operators.log_softmax(logits)[0]

    def greedy_sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Most likely token ids [M]; which of equal logits wins does not depend on M."""
        return self._operators.argmax(logits)[0]

    def apply_temperature(
        self,
        logits: torch.Tensor,
        temp: torch.Tensor,
        all_random: bool,  # noqa: FBT001  # vLLM has it so
    ) -> torch.Tensor:
        """Logits [B, V] over `temp` [B]; a greedy row is left as it is."""
        if not all_random:
            temp = torch.where(temp < _SAMPLING_EPS, 1.0, temp)
        return self._operators.temperature(logits, temp)[0]

    def apply_penalties(
        self, logits: torch.Tensor, metadata: Any, output_token_ids: list[list[int]]
    ) -> torch.Tensor:
        """Penalize the rows that ask for it; `output_token_ids` are those of each row so far."""
        if metadata.no_penalties:
            return logits
        known = make_tensor_with_pad(
            output_token_ids, pad=logits.shape[1], device="cpu", dtype=torch.int64
        ).to(logits.device)
        known.masked_fill_(known == -1, logits.shape[1])  # vLLM's placeholder of a row without any
        presence, frequency = metadata.presence_penalties, metadata.frequency_penalties
        repetition = metadata.repetition_penalties
        asked = (presence != 0) | (frequency != 0) | (repetition != 1)
        others = (metadata.prompt_token_ids, known, presence, frequency, repetition)
        return _for_rows(asked, self._operators.penalties, logits, *others)

    def gather_specific_token_logprobs(
        self,
        logprobs: torch.Tensor,  # noqa: ARG002  # vLLM has it so
        logprob_token_ids: dict[int, list[int]],  # noqa: ARG002  # as above
        sampled: torch.Tensor,  # noqa: ARG002  # as above
    ) -> None:
        """None: vLLM would give every row of the batch the form that one asks for."""
        return

    @staticmethod
    def gather_logprobs(
        logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> LogprobsTensors:
        """Top logprobs with ties in order of token id, whatever `num_logprobs` a neighbour asks.

        For `ranks` see vLLM: how many tokens are at least as likely.
        """
        token_ids = token_ids.unsqueeze(-1)
        chosen = logprobs.gather(-1, token_ids)
        top = top_token_ids(logprobs, num_logprobs)
        ranks = (logprobs >= chosen).sum(-1)
        return LogprobsTensors(
            torch.cat((token_ids, top), dim=1).to(torch.int32),
            torch.cat((chosen, logprobs.gather(-1, top)), dim=1),
            ranks,
        )


def top_token_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """[M, count] int64, indices of the largest of `values` [M, V] float32: the lower among equals.

    torch.topk leaves the order of equal values open and it moves with the count, which vLLM takes
    as the batch's maximum; short dtypes make equal values common.
    """
    return torch.topk(_ordered_keys(values), count, dim=-1).indices


def _ordered_keys(values: torch.Tensor) -> torch.Tensor:
    """[M, V] int64, all different in a row: larger float first, then smaller index."""
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    index = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return (ordered << 32) | index


def install_sampler(
    runner: Any,
    described: Sequence[RowOperator],
    plans: Mapping[tuple[str, str], OperatorPlan],
) -> list[CertifiedRows]:
    """Give `runner` the strict sampler; returns the operators that now serve."""
    certified = {
        o.name: CertifiedRows(o.function, proof_of(plans[o.name, o.shape]), o.block_rows)
        for o in described
    }
    operators = CertifiedSampling(
        **{name.replace("-", "_"): rows for name, rows in certified.items()}
    )
    seams.filter_by_min_p(operators.filter_by_min_p)
    mode = runner.model_config.logprobs_mode
    runner.sampler = StrictSampler(lambda rows: _draws(runner, rows), operators, mode)
    return [*certified.values()]


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
        greedy = params.temperature < _SAMPLING_EPS
        seed = None if greedy else _seed(params.seed, request)
        draws.append(Draw(seed=seed, position=int(batch.num_tokens_no_spec[row])))
    return draws


def _seed(given: int | None, request: str) -> int:
    """The request's seed; one without is drawn from its id, so that it is stable for its life."""
    if given is not None:
        return given
    return int.from_bytes(request.encode()[-8:].rjust(8, b"\0"), "big") >> 11
