"""What the side channel says of an answer: by its id, its sequences, how far it was delivered."""

import hashlib
import struct
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from isobatch_worker import answers
from isobatch_worker.answers import Answers, Told, keep

ID = "req-0123"


def told(name: str = f"chatcmpl-{ID}", **fields: Any) -> Told:
    defaults: dict[str, Any] = {"output": 0, "outputs": 1, "prompt_tokens": 7, "tokens": [5, 6]}
    return Told(name, **(defaults | {"logprobs": None, "is_finished": False} | fields))


def ids_digest(*ids: int) -> str:
    return "sha256:" + hashlib.sha256(array("i", ids).tobytes()).hexdigest()


def bits_digest(*logprobs: float) -> str:
    return "sha256:" + hashlib.sha256(struct.pack(f"<{len(logprobs)}f", *logprobs)).hexdigest()


def test_tokens_of_several_steps_are_one_answer() -> None:
    kept = Answers()
    kept.tell(told())
    kept.tell(told(tokens=[7], is_finished=True))

    found = kept.digests(ID)

    assert found is not None
    (one,) = found.sequences
    assert (one.tokens, one.finished, one.prompt_tokens) == (3, True, 7)
    assert one.token_ids == ids_digest(5, 6, 7)
    assert one.logprobs is None
    assert one.ids is None


def test_what_was_delivered_of_it_can_be_asked_for() -> None:
    kept = Answers()
    logprobs = struct.pack("<4f", 1, 2, 3, 4)
    kept.tell(told(logprobs=logprobs, is_finished=True))

    found = kept.digests(ID, [1], with_ids=True)

    assert found is not None
    (one,) = found.sequences
    assert (one.tokens, one.finished, one.ids) == (1, False, (5,))
    assert one.token_ids == ids_digest(5)
    assert one.logprobs == bits_digest(1, 2)


def test_prompts_and_outputs_are_told_apart_as_their_choices_are() -> None:
    kept = Answers()
    for prompt in (1, 0):
        for output in (0, 1):
            name = f"cmpl-{ID}-{prompt}"
            kept.tell(told(name, output=output, outputs=2, tokens=[10 * prompt + output]))

    found = kept.digests(ID)

    assert found is not None
    assert [(s.index, s.prompt) for s in found.sequences] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert found.sequences[3].token_ids == ids_digest(11)


def test_an_unknown_or_forgotten_id_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_MOST_REQUESTS", 2)
    kept = Answers()
    for number in range(3):
        kept.tell(told(f"chatcmpl-{number}"))

    assert kept.digests("0") is None
    assert kept.digests("2") is not None


def test_long_answers_push_out_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_MOST_BYTES", 100)
    kept = Answers()
    for number in range(3):
        kept.tell(told(f"chatcmpl-{number}", tokens=list(range(20))))

    assert kept.digests("1") is None
    assert kept.digests("2") is not None


def test_columns_that_a_neighbour_asked_for_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Answers()
    monkeypatch.setattr(answers, "KEPT", kept)
    state = SimpleNamespace(
        external_req_id=f"chatcmpl-{ID}",
        request_index=0,
        parent_req=None,
        prompt_len=3,
        logprobs_processor=SimpleNamespace(num_logprobs=1),
    )
    bits = np.array([[-1.5, -0.0, 9.0], [-2.5, -3.0, 9.0]], dtype=np.float32)
    output = SimpleNamespace(new_token_ids=[1, 2], new_logprobs=SimpleNamespace(logprobs=bits))

    keep(state, output, True)

    found = kept.digests(ID)
    assert found is not None
    assert found.sequences[0].logprobs == bits_digest(-1.5, -0.0, -2.5, -3.0)
