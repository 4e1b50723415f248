"""Keeps what the engine answered, for a while: token ids and logprob bits, by request id.

Kept by whoever sees every output before its client does, asked for by the side channel.
"""

import hashlib
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from isobatch_contracts.receipt import AnswerDigests, SequenceDigests

_MOST_REQUESTS = 4096
_MOST_BYTES = 128 * 1024 * 1024
# A completion may have several prompts, whose numbers vLLM appends; a chat has one.
_ID = re.compile(r"chatcmpl-(?P<chat>.+)|cmpl-(?P<id>.+)-(?P<prompt>[0-9]+)")


class Told(NamedTuple):
    """One output of the engine. `name` is vLLM's for the request; `logprobs` float32 bits."""

    name: str
    output: int  # which of the n outputs of one prompt
    outputs: int  # n
    prompt_tokens: int
    tokens: Sequence[int]
    logprobs: bytes | None
    is_finished: bool


class _Sequence:
    """What is kept of one sequence. `sizes`: bytes of logprobs up to each token."""

    __slots__ = ("is_finished", "logprobs", "prompt", "prompt_tokens", "sizes", "tokens")

    def __init__(self, prompt: int, prompt_tokens: int) -> None:
        self.prompt, self.prompt_tokens = prompt, prompt_tokens
        self.tokens = array("i")
        self.logprobs: bytearray | None = None
        self.sizes = array("q")
        self.is_finished = False

    def add(self, told: Told) -> int:
        """Take one output; how many bytes more are kept."""
        self.tokens.extend(told.tokens)
        self.is_finished = self.is_finished or told.is_finished
        size = self.tokens.itemsize * len(told.tokens)
        if told.logprobs is not None and told.tokens:
            if self.logprobs is None:
                self.logprobs = bytearray()
            each = len(told.logprobs) // len(told.tokens)
            for _ in told.tokens:
                self.sizes.append((self.sizes[-1] if self.sizes else 0) + each)
            self.logprobs += told.logprobs
            size += len(told.logprobs)
        return size

    def digests(self, index: int, at: int | None, *, with_ids: bool) -> SequenceDigests:
        """Of the first `at` tokens, or of all."""
        count = len(self.tokens) if at is None else min(at, len(self.tokens))
        ids, bits = self.tokens[:count], None
        if self.logprobs is not None:
            bits = self.logprobs[: self.sizes[count - 1] if count else 0]
        return SequenceDigests(
            index=index,
            prompt=self.prompt,
            prompt_tokens=self.prompt_tokens,
            tokens=count,
            finished=self.is_finished and count == len(self.tokens),
            token_ids=_digest(ids.tobytes()),
            logprobs=None if bits is None else _digest(bits),
            ids=tuple(ids) if with_ids else None,
        )


class Answers:
    """The answers of one API server, the last ones it gave."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, dict[int, _Sequence]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._bytes = 0

    def tell(self, told: Told) -> None:
        """Keep one output."""
        found = _ID.fullmatch(told.name)
        if found is None:
            return  # a path of vLLM's that no gateway asks
        name, prompt = found["chat"] or found["id"], int(found["prompt"] or 0)
        sequences = self._requests.get(name)
        if sequences is None:
            sequences = self._requests[name] = {}
        index = prompt * told.outputs + told.output
        sequence = sequences.get(index)
        if sequence is None:
            sequence = sequences[index] = _Sequence(prompt, told.prompt_tokens)
        size = sequence.add(told)
        self._sizes[name] = self._sizes.get(name, 0) + size
        self._bytes += size
        self._forget()

    def digests(
        self, name: str, at: Sequence[int] = (), *, with_ids: bool = False
    ) -> AnswerDigests | None:
        """What is known of request `name`; `at`: of each sequence only so many tokens."""
        sequences = self._requests.get(name)
        if sequences is None:
            return None
        # One number counts for all of them.
        limits = {index: at[min(index, len(at) - 1)] for index in sequences} if at else {}
        return AnswerDigests(
            sequences=tuple(
                sequences[index].digests(index, limits.get(index), with_ids=with_ids)
                for index in sorted(sequences)
            )
        )

    def _forget(self) -> None:
        while len(self._requests) > _MOST_REQUESTS or self._bytes > _MOST_BYTES:
            name, _ = self._requests.popitem(last=False)
            self._bytes -= self._sizes.pop(name)


KEPT = Answers()
"""Those of this process: vLLM's plugin fills it, vLLM's middleware reads it, and nothing else that
vLLM lets us in to joins the two."""


def keep(state: Any, output: Any, is_over: bool) -> None:  # noqa: FBT001  # as the seam calls it
    """Keep one output of the engine: vLLM's RequestState and EngineCoreOutput."""
    parent, logprobs = state.parent_req, None
    # Columns beyond those asked for are there when a neighbour asked for more.
    asked = None if state.logprobs_processor is None else state.logprobs_processor.num_logprobs
    if asked is not None and output.new_logprobs is not None:
        own = output.new_logprobs.logprobs[:, : asked + 1]
        logprobs = np.ascontiguousarray(own, dtype="<f4").tobytes()
    told = Told(
        name=state.external_req_id,
        output=state.request_index,
        outputs=1 if parent is None else parent.n,
        prompt_tokens=state.prompt_len,
        tokens=output.new_token_ids,
        logprobs=logprobs,
        is_finished=is_over,
    )
    KEPT.tell(told)


def _digest(content: bytes | bytearray) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
