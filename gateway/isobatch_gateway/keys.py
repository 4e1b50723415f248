"""Decides who a request comes from: API keys, kept as hashes in one JSON file."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated

from isobatch_contracts.base import Document
from isobatch_contracts.fields import Digest, ModelName
from isobatch_contracts.resource import TierLimits
from isobatch_contracts.tiers import Tier
from pydantic import Field, StringConstraints, ValidationError

from isobatch_gateway.errors import SettingsInvalid
from isobatch_gateway.tiers import Policy

PREFIX = "isk-"
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$")]


class Key(Document):
    """One API key. The key itself is shown once, when it is made; the file has its hash.

    A plain SHA-256 is enough, and fast: the key is 256 random bits, not a password.
    """

    id: Label
    tenant: Label
    hash: Digest
    tiers: tuple[Tier, ...] = tuple(Tier)
    models: tuple[ModelName, ...] | None = Field(None, description="None: every model.")
    default_tier: Tier | None = None
    limits: dict[Tier, TierLimits] = Field(default_factory=dict)
    created: datetime

    @property
    def policy(self) -> Policy:
        """What this key says of tiers."""
        return Policy(default=self.default_tier, allowed=frozenset(self.tiers))

    def may_see(self, model: str) -> bool:
        """Whether this key may know that `model` exists."""
        return self.models is None or model in self.models


class KeyFile(Document):
    """The file that `isobatch key` writes."""

    keys: tuple[Key, ...] = ()


class KeyRing:
    """The keys of one file, by hash."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._by_hash = {key.hash: key for key in keys}

    def holder(self, token: str | None) -> Key | None:
        """Whose `token` it is; None for no token and for an unknown one alike."""
        hashed = hash_token(token or "")
        found = self._by_hash.get(hashed)
        # The look-up is by a digest that the caller cannot steer; the comparison still takes the
        # same time for a hit and a miss.
        known = found.hash if found is not None else "sha256:" + "0" * 64
        return found if hmac.compare_digest(hashed, known) else None


def hash_token(token: str) -> str:
    """The form of `token` that is stored."""
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """A fresh key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def bearer(header: str | None) -> str | None:
    """The token of an `Authorization` header, if it is a bearer's."""
    if header is None:
        return None
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def parse(text: str | bytes) -> KeyFile:
    """The key file in `text`. Raises `SettingsInvalid` if it is none."""
    try:
        return KeyFile.model_validate_json(text)
    except ValidationError as exc:
        problem = exc.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"]) or "the file"
        raise SettingsInvalid(f"keys file: {place}: {problem['msg']}") from exc


def add(file: KeyFile, key: Key) -> KeyFile:
    """`file` with `key`. Raises `SettingsInvalid` if its id is taken."""
    if any(known.id == key.id for known in file.keys):
        raise SettingsInvalid(f"there is a key {key.id!r} already: choose another id or revoke it")
    if key.default_tier is not None and key.default_tier not in key.tiers:
        raise SettingsInvalid(f"default tier {key.default_tier.value!r} is not among its tiers")
    return KeyFile(keys=(*file.keys, key))


def remove(file: KeyFile, key_id: str) -> KeyFile | None:
    """`file` without the key `key_id`; None if it has none."""
    kept = tuple(key for key in file.keys if key.id != key_id)
    return None if len(kept) == len(file.keys) else KeyFile(keys=kept)
