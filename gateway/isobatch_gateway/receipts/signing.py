"""Decides how records are signed, and which public keys an auditor trusts."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from isobatch_gateway.errors import SettingsInvalid
from isobatch_gateway.files import create_private

_SEED = 32


def key_id(public: bytes) -> str:
    """The name of a public key: the beginning of its digest."""
    return "ed25519:" + hashlib.sha256(public).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Signer:
    """One private key."""

    id: str
    public: bytes
    _key: Ed25519PrivateKey

    @classmethod
    def of(cls, seed: bytes) -> "Signer":
        """The signer whose private key is `seed` (32 bytes, RFC 8032)."""
        private = Ed25519PrivateKey.from_private_bytes(seed)
        public = private.public_key().public_bytes_raw()
        return cls(key_id(public), public, private)

    def sign(self, payload: bytes) -> bytes:
        """The signature of `payload`, 64 bytes."""
        return self._key.sign(payload)


def read_signers(path: Path) -> tuple[Signer, ...]:
    """The keys in `path`, one in hex a line; the last signs. A file that does not exist is made.

    The former ones stay there for the one record that hands a chain over to the next key.
    """
    try:
        create_private(path, new_seed())
        seeds = [bytes.fromhex(text) for text in path.read_text().split()]
    except (OSError, ValueError) as exc:
        raise SettingsInvalid(f"signing keys {path}: {exc}") from exc
    if not seeds or any(len(seed) != _SEED for seed in seeds):
        raise SettingsInvalid(f"signing keys {path}: lines of {2 * _SEED} hex digits are needed")
    return tuple(Signer.of(seed) for seed in seeds)


def new_seed() -> bytes:
    """A line of the signing keys file with a new private key."""
    return Ed25519PrivateKey.generate().private_bytes_raw().hex().encode() + b"\n"


class PublicKey(BaseModel):
    """One line of the public key file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str
    public: str = Field(pattern=r"^[0-9a-f]{64}$", description="32 bytes in hex")


_FILE = TypeAdapter(tuple[PublicKey, ...])


class KeysInvalid(ValueError):
    """A public key file that cannot be used; the message says why."""


class Trusted:
    """The public keys that signatures are held against."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._keys = {name: Ed25519PublicKey.from_public_bytes(raw) for name, raw in keys.items()}

    @classmethod
    def read(cls, raw: bytes) -> "Trusted":
        """The keys of a public key file. Raises `KeysInvalid`."""
        try:
            listed = _FILE.validate_json(raw)
        except ValidationError as exc:
            raise KeysInvalid("no public key file: a JSON list of {id, public} is needed") from exc
        for key in listed:
            if key_id(bytes.fromhex(key.public)) != key.id:
                raise KeysInvalid(f"key {key.id} is not named by its own digest")
        return cls({key.id: bytes.fromhex(key.public) for key in listed})

    def knows(self, name: str) -> bool:
        """Whether `name` is a trusted key."""
        return name in self._keys

    def is_signed(self, name: str, payload: bytes, signature: bytes) -> bool:
        """Whether the key `name` signed `payload`."""
        try:
            self._keys[name].verify(signature, payload)
        except (InvalidSignature, KeyError):
            return False
        return True


def public_file(keys: Mapping[str, bytes]) -> bytes:
    """The public key file of `keys`."""
    listed = tuple(PublicKey(id=name, public=raw.hex()) for name, raw in sorted(keys.items()))
    return _FILE.dump_json(listed, indent=1) + b"\n"
