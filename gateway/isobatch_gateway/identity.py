"""Decides what is derived from the gateway's secret: cache salts, drawn seeds, conversations.

Every derivation hashes its fields with their lengths in front, so that no two lists of fields read
as the same bytes.
"""

import base64
import hashlib
import hmac
from typing import Any

SEED_RANGE = 1 << 53  # the largest range in which every JSON reader keeps an integer exact
_PROMPT_PREFIX = 512  # characters or tokens of a prompt that name its conversation


def packed(*fields: str | bytes) -> bytes:
    """The fields as one byte string, each behind its length."""
    parts = []
    for field in fields:
        raw = field.encode("utf-8", "surrogatepass") if isinstance(field, str) else field
        parts.append(len(raw).to_bytes(8, "big") + raw)
    return b"".join(parts)


def cache_salt(secret: bytes, tenant: str) -> str:
    """The prefix-cache salt of `tenant`: tenants never share cached prefixes (256 bits)."""
    mac = hmac.digest(secret, packed("cache-salt", tenant), "sha256")
    return base64.urlsafe_b64encode(mac).decode().rstrip("=")


def keyed_seed(secret: bytes, tenant: str, key: str, digest: bytes) -> int:
    """The seed of a request with an idempotency key: a repeat draws the same one."""
    mac = hmac.digest(secret, packed("seed", tenant, key, digest), "sha256")
    return int.from_bytes(mac[:8], "big") % SEED_RANGE


def share(*fields: str) -> float:
    """A fixed number in [0, 1) for `fields`, spread evenly."""
    raw = hashlib.blake2b(packed(*fields), digest_size=8).digest()
    return (int.from_bytes(raw, "big") >> 11) / SEED_RANGE


def conversation(document: dict[str, Any]) -> str | None:
    """What names the conversation of a body that came without `X-Conversation-Id`.

    The messages up to the first of the user, or the beginning of the prompt: both stay the same as
    the conversation grows. None if there is nothing to go by.
    """
    messages = document.get("messages")
    if isinstance(messages, list) and messages:
        opening: list[Any] = []
        for message in messages[:8]:
            opening.append(message)
            if isinstance(message, dict) and message.get("role") == "user":
                break
        return _short_digest(repr(opening))
    prompt = document.get("prompt")
    if isinstance(prompt, str | list) and prompt:
        return _short_digest(repr(prompt[:_PROMPT_PREFIX]))
    return None


def _short_digest(text: str) -> str:
    raw = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
