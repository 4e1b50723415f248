"""Decides whether the token ids that a request names are ids of the model's vocabulary.

vLLM 0.26 lets some others through (a prompt's first id past the vocabulary, `stop_token_ids` under
`min_tokens`), and its engine dies of them, with every request that it was answering.
"""

from collections.abc import Iterable
from typing import Any

from isobatch_contracts import errors

from isobatch_gateway.refusals import Refusal

_NAMING = ("prompt", "stop_token_ids", "allowed_token_ids")
"""Fields of a request that hold token ids, or lists of them, among other things."""


def out_of_vocabulary(document: dict[str, Any], vocabulary: int | None) -> Refusal | None:
    """Why `document` cannot be asked of a model of `vocabulary` tokens; None if it can.

    None also where nobody has told the vocabulary: then vLLM decides.
    """
    if vocabulary is None:
        return None
    for name in _NAMING:
        value = document.get(name)
        if not isinstance(value, list):
            continue
        parts = [value, *(part for part in value if isinstance(part, list))]
        wrong = next((w for part in parts if (w := _wrong(part, vocabulary)) is not None), None)
        if wrong is not None:
            return Refusal(
                errors.invalid_request(name),
                f"{name} holds the token id {wrong}; the model's are 0 to {vocabulary - 1}.",
                param=name,
            )
    return None


def _wrong(part: Iterable[Any], vocabulary: int) -> int | None:
    ids = [one for one in part if type(one) is int]
    if not ids:
        return None
    low, high = min(ids), max(ids)
    if low < 0:
        return low
    return high if high >= vocabulary else None
