"""Decides what a receipt says of a request and its answer. No floats: their text stands instead."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from isobatch_contracts.numerics import Certified
from isobatch_contracts.receipt import AnswerDigests
from isobatch_contracts.resource import Receipts
from isobatch_contracts.tiers import Tier

from isobatch_gateway.body import Body
from isobatch_gateway.receipts.canonical import NotCanonical, canonical_of_request
from isobatch_gateway.receipts.content import keyed, keyed_of

DIGEST, FULL = "Digest", "Full"

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "max_completion_tokens"),
    *("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs"),
    *("top_logprobs", "prompt_logprobs", "ignore_eos", "stream", "echo", "use_beam_search"),
    *(
        "length_penalty",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "truncate_prompt_tokens",
    ),
    *("add_special_tokens", "add_generation_prompt", "continue_final_message"),
)
"""Fields of a body whose numbers and booleans a receipt shows."""

_CONTENT = (
    *("stop", "stop_token_ids", "logit_bias", "tools", "tool_choice", "response_format"),
    *("structured_outputs", "bad_words", "suffix", "chat_template", "chat_template_kwargs"),
)
"""Fields that shape an answer and are content: a receipt says that they were there."""


class Asking(NamedTuple):
    """A request that gets a receipt. `body` is None where it could not be read."""

    path: str
    request_id: str
    tenant: str
    key_id: str | None
    tier: Tier
    mode: str  # Digest | Full
    model: str | None
    service: str | None
    fingerprint: str | None  # required by the client
    seed: int | None
    raw: bytes
    body: Body | None


def mode_of(tier: Tier, policy: Receipts) -> str | None:
    """What is kept of a request of `tier`: `Digest`, `Full`, or None for no receipt."""
    wanted = policy.strict if tier.is_bitwise else policy.standard
    return None if wanted == "Off" else wanted


def open_body(asking: Asking, key: bytes) -> dict[str, Any]:
    """The body of an `open` record; `key` is the tenant's."""
    document = {} if asking.body is None else asking.body.document
    return {
        "requestId": asking.request_id,
        "path": asking.path,
        "tenant": asking.tenant,
        "keyId": asking.key_id,
        "tier": asking.tier.value,
        "mode": asking.mode,
        "model": asking.model,
        "service": asking.service,
        "requiredFingerprint": asking.fingerprint,
        "seed": None if asking.seed is None else str(asking.seed),
        "request": request_digests(asking.raw, asking.body, key),
        "sampling": sampling_of(document),
        "content": [name for name in _CONTENT if document.get(name) is not None],
    }


def request_digests(raw: bytes, body: Body | None, key: bytes) -> dict[str, Any]:
    """Digests of a request: of its exact bytes, and of its canonical form if it has one."""
    try:
        written = None if body is None else canonical_of_request(body.document, len(raw))
    except NotCanonical:
        written = None
    return {
        "bytes": len(raw),
        "exact": keyed_of(key, raw),
        "canonical": None if written is None else keyed_of(key, written),
    }


def sampling_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters in `document` that are numbers or booleans."""
    found: dict[str, Any] = {}
    for name in _SAMPLING:
        value = document.get(name)
        if isinstance(value, bool):
            found[name] = value
        elif isinstance(value, int | float):
            found[name] = repr(value)
    return found


def answer_body(digests: AnswerDigests | str, key: bytes) -> dict[str, Any]:
    """What a final record says of the tokens; a text says why nothing is known of them."""
    if isinstance(digests, str):
        return {"missing": digests}
    return {
        "sequences": [
            {
                "index": one.index,
                "promptTokens": one.prompt_tokens,
                "tokens": one.tokens,
                "finished": one.finished,
                "tokenIds": keyed(key, _raw(one.token_ids)),
                "logprobs": None if one.logprobs is None else keyed(key, _raw(one.logprobs)),
            }
            for one in digests.sequences
        ]
    }


def usage_of(digests: AnswerDigests | str) -> dict[str, int] | None:
    """The tokens of an answer; a prompt that several sequences share counts once."""
    if isinstance(digests, str) or not digests.sequences:
        return None
    prompts = {one.prompt: one.prompt_tokens for one in digests.sequences}
    return {
        "promptTokens": sum(prompts.values()),
        "completionTokens": sum(one.tokens for one in digests.sequences),
    }


def numerics_body(certified: Certified | None) -> dict[str, Any] | None:
    """What fixed the bits of an answer."""
    if certified is None:
        return None
    return {
        "fingerprint": certified.fingerprint,
        "modelDigest": certified.model_digest,
        "device": certified.device,
        "versions": dict(certified.versions),
    }


def choices_asked(path: str, document: Mapping[str, Any]) -> int:
    """How many sequences an answer will have, as far as the body says."""
    n = document.get("n")
    count = n if isinstance(n, int) and not isinstance(n, bool) and n > 0 else 1
    prompt = document.get("prompt")
    if path == "/v1/completions" and isinstance(prompt, list) and prompt:
        # A list of numbers is one prompt; of texts or lists, as many as it has.
        count *= 1 if isinstance(prompt[0], int) else len(prompt)
    return count


def _raw(digest: str) -> bytes:
    return bytes.fromhex(digest.removeprefix("sha256:"))
