"""Decides what our OpenAPI document says of the paths that replicas answer.

The schemas promise what holds of every answer, vLLM's and ours; vLLM documents the rest.
"""

from typing import Any

_ERROR = {"$ref": "#/components/schemas/Error"}
_TIERS = ["strict", "verified", "standard"]

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}

_SUMMARIES = {
    "/v1/chat/completions": ("Chat completion, streamed or not", ["messages"]),
    "/v1/completions": ("Completion, streamed or not", ["prompt"]),
    "/v1/embeddings": ("Embeddings (standard tier)", ["input"]),
    "/tokenize": ("Tokens of a text", []),
    "/detokenize": ("Text of tokens", ["tokens"]),
}
PROXIED = tuple(_SUMMARIES)

_STATUSES = {
    "400": "The request is wrong; `code` names the field.",
    "401": "The API key is missing or unknown.",
    "403": "The tier is not allowed for this key or service.",
    "404": "The model does not exist or this key may not use it.",
    "408": "The body did not come in time.",
    "409": "The idempotency key was used for another request.",
    "412": "No ready replica has the required fingerprint.",
    "413": "The body is over the limit.",
    "415": "The body is not JSON, or compressed.",
    "429": "Over a limit of the tier; see `Retry-After`.",
    "500": "The gateway failed.",
    "502": "The replica failed before its first byte.",
    "503": "The pool cannot serve; strict and verified never fall back. See `Retry-After`.",
    "504": "The replica did not begin to answer in time.",
}


def describe(document: dict[str, Any], *, has_keys: bool) -> dict[str, Any]:
    """Add the proxied paths and the error schema to FastAPI's `document`."""
    document.setdefault("components", {}).setdefault("schemas", {})["Error"] = ERROR_SCHEMA
    for item in document["paths"].values():
        for operation in item.values():
            operation["responses"].pop("422", None)  # FastAPI's; ours is a 400 like any other
    for path, (summary, fields) in _SUMMARIES.items():
        document["paths"][path] = {"post": _operation(path, summary, fields)}
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, item in document["paths"].items():
            if path.startswith(("/v1/", "/isobatch/", "/tokenize", "/detokenize")):
                for operation in item.values():
                    operation["security"] = [{"key": []}]
                    operation["responses"]["401"] = _error(_STATUSES["401"])
    return document


def _operation(path: str, summary: str, fields: list[str]) -> dict[str, Any]:
    media: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path.endswith("completions"):
        media["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "tags": ["models"],
        "parameters": _parameters(),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _request_schema(fields)}},
        },
        "responses": {
            "200": {"description": "The replica's answer, unchanged.", "content": media},
            **{status: _error(text) for status, text in _STATUSES.items()},
            "4XX": _error("Refused by the replica; its own words."),
        },
    }


def _request_schema(fields: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["model", *fields],
        "properties": {
            "model": {"type": "string", "description": "Served name; `name:strict` sets the tier."},
            "consistency_tier": {"enum": [*_TIERS, None]},
            "seed": {
                "type": ["integer", "null"],
                "minimum": -(1 << 63),
                "maximum": (1 << 63) - 1,
            },
            **{field: {} for field in fields},
        },
        "additionalProperties": True,
    }


def _parameters() -> list[dict[str, Any]]:
    printable = {"type": "string", "pattern": "^[!-~]{1,128}$"}
    described: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("X-Consistency-Tier", {"enum": _TIERS}, "The tier; else the body, the model's suffix."),
        ("X-Conversation-Id", printable, "Keeps a conversation on its revision and replica."),
        (
            "X-Require-Fingerprint",
            {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
            "412 unless a replica with it is ready.",
        ),
        ("X-Request-Id", printable, "Echoed."),
        ("Idempotency-Key", printable, "A repeat draws the same seed."),
    )
    return [
        {"name": name, "in": "header", "required": False, "schema": schema, "description": text}
        for name, schema, text in described
    ]


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _ERROR}}}
