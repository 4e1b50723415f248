"""Decides what a request's JSON body asks, and how it reads to the worker."""

import hashlib
import json
from typing import Any, NamedTuple, Never

import orjson
from isobatch_contracts import errors
from isobatch_contracts.tiers import Tier

from isobatch_gateway import identity
from isobatch_gateway.refusals import Refusal
from isobatch_gateway.tiers import BODY_FIELD, split_model

GENERATING = frozenset({"/v1/chat/completions", "/v1/completions"})
SALTED = GENERATING | {"/v1/embeddings"}
_OURS = (BODY_FIELD, "cache_salt", "priority", "kv_transfer_params")
"""Fields that never reach a worker as the client sent them."""

# orjson reads an integer beyond 64 bits as a float; the standard library keeps it, and is slower.
# To find one, digits are made zeros and a run of zeros is searched: faster than a pattern.
_ZEROS = bytes(ord("0") if byte in b"0123456789" else byte for byte in range(256))
_LONG_NUMBER = b"0" * 19
_INT64 = range(-(1 << 63), 1 << 63)
_TIER_KEY = f'"{BODY_FIELD}"'.encode()
_TOO_DEEP = "The body's JSON is nested too deeply."
_NO_SEED = -1  # vLLM reads a seed of -1 as none


class Body(NamedTuple):
    """A body that was read. `model` is without its suffix; None if the body names none."""

    document: dict[str, Any]
    raw: bytes
    model: str | None
    suffix: Tier | None


class Seeding(NamedTuple):
    """What a strict request's seed is drawn from when the client gives none. `draw` is random."""

    secret: bytes
    tenant: str
    idempotency_key: str | None
    draw: int


def read_body(raw: bytes) -> Body | Refusal:
    """The JSON object in `raw`, with its model name taken apart."""
    document = _parse(raw)
    if isinstance(document, Refusal):
        return document
    if not isinstance(document, dict):
        return _bad("body", f"The body must be a JSON object, not {_kind(document)}.")
    # A key may be spelled with escapes, of which only those of ASCII could hide one.
    may_repeat = raw.count(_TIER_KEY) > 1 or (b"\\u00" in raw and BODY_FIELD in document)
    repeated = _repeated_tier(raw) if may_repeat else None
    if repeated is not None:
        return repeated
    name = document.get("model")
    if name is None:
        return Body(document, raw, None, None)
    if not isinstance(name, str):
        return _bad("model", f"model must be a string, not {_kind(name)}.")
    model, suffix = split_model(name)
    return Body(document, raw, model, suffix)


def request_digest(path: str, body: Body) -> bytes:
    """What makes two requests the same one for an idempotency key: path and JSON content."""
    try:
        canonical = orjson.dumps(body.document, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # integers beyond 64 bits
        canonical = json.dumps(body.document, sort_keys=True).encode()
    return hashlib.sha256(identity.packed(path, canonical)).digest()


def seed_of(body: Body, seeding: Seeding, path: str) -> int | Refusal:
    """The seed that a strict request runs with: the client's own, or a drawn one."""
    given = body.document.get("seed")
    if given is None or given == _NO_SEED:
        if seeding.idempotency_key is None:
            return seeding.draw
        digest = request_digest(path, body)
        return identity.keyed_seed(seeding.secret, seeding.tenant, seeding.idempotency_key, digest)
    if isinstance(given, bool) or not isinstance(given, int) or given not in _INT64:
        return _bad(
            "seed",
            f"seed must be an integer of 64 bits, got {_kind(given)}; "
            "leave it out to have one drawn.",
        )
    count = body.document.get("n")
    if given < 0 and isinstance(count, int) and given + count > _NO_SEED:
        return _bad(
            "seed",
            f"seed {given} with n {count} reaches {_NO_SEED}, which vLLM reads as no seed; its "
            "choices have the seeds that follow. Give one of 0 or more.",
        )
    return given


_NOT_STRICT = {
    "logprob_token_ids": "vLLM gives every request of a batch the form that one asks for; ask for "
    "logprobs, or in tier standard",
}


def strict_refusal(body: Body) -> Refusal | None:
    """Why `body` asks what the strict pool does not give, or None."""
    for name, why in _NOT_STRICT.items():
        if body.document.get(name) is not None:
            return _bad(name, f"{name} is not available in tier strict: {why}.")
    return None


def rewrite(body: Body, *, salt: str | None, seed: int | None) -> bytes | Refusal:
    """`body` as the worker gets it: byte for byte as it came where nothing of ours is in it."""
    document = body.document
    renamed = body.suffix is not None
    if salt is None and seed is None and not renamed and not any(f in document for f in _OURS):
        return body.raw
    sent = {name: value for name, value in document.items() if name not in _OURS}
    if renamed:
        sent["model"] = body.model
    if salt is not None:
        sent["cache_salt"] = salt
    if seed is not None:
        sent["seed"] = seed
    return _dump(sent)


def _parse(raw: bytes) -> Any | Refusal:
    if not raw:
        return _bad("body", "The body is empty; send a JSON object.")
    try:
        if _LONG_NUMBER in raw.translate(_ZEROS):
            return json.loads(raw, parse_constant=_refuse_constant)
        return orjson.loads(raw)
    except RecursionError:
        return _bad("body", _TOO_DEEP)
    except ValueError as exc:
        # Only the position: the decoder's message may quote the body.
        place = getattr(exc, "pos", None)
        where = f" at byte {place}" if isinstance(place, int) and place > 0 else ""
        return _bad("body", f"The body is not valid JSON in UTF-8{where}.")


def _repeated_tier(raw: bytes) -> Refusal | None:
    """The refusal of a body that declares its tier twice: parsers keep the last one."""
    keys: list[str] = []

    def keep(pairs: list[tuple[str, Any]]) -> None:
        keys[:] = [key for key, _ in pairs]  # the outermost object is the last to be closed

    try:
        json.loads(raw, object_pairs_hook=keep)
    except RecursionError:
        return _bad("body", _TOO_DEEP)
    if keys.count(BODY_FIELD) < 2:
        return None
    return _bad(BODY_FIELD, f"The body has {BODY_FIELD} twice; declare one tier.")


def _dump(document: dict[str, Any]) -> bytes | Refusal:
    try:
        return orjson.dumps(document)
    except TypeError:
        pass  # integers beyond 64 bits, or nesting beyond orjson's limit
    try:
        return json.dumps(document).encode()
    except (RecursionError, ValueError):
        return _bad("body", _TOO_DEEP)


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is no JSON")


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _bad(field: str, message: str) -> Refusal:
    return Refusal(errors.invalid_request(field), message, param=field)
