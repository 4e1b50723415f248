"""Decides what is kept of content: keyed digests, or all of it under encryption."""

import hashlib
import hmac
import os
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from isobatch_gateway.errors import SettingsInvalid
from isobatch_gateway.files import create_private
from isobatch_gateway.identity import packed

_NONCE = 12


class ContentUnreadable(Exception):
    """Content whose key is not here, or that was altered."""


def tenant_key(secret: bytes, tenant: str) -> bytes:
    """The key under which a tenant's digests are made: who lacks it cannot guess short texts."""
    return hmac.digest(secret, packed("receipt", tenant), "sha256")


def keyed(key: bytes, digest: bytes) -> str:
    """`hmac-sha256:…` of a SHA-256 (32 bytes) under `key`."""
    return "hmac-sha256:" + hmac.new(key, digest, hashlib.sha256).hexdigest()


def keyed_of(key: bytes, content: bytes) -> str:
    """`keyed` of the SHA-256 of `content`."""
    return keyed(key, hashlib.sha256(content).digest())


class ContentKeys(Protocol):
    """What wraps the key of each content: a file's key here; a key service has the same shape."""

    def wrap(self, key: bytes, name: bytes) -> bytes:
        """`key` encrypted for `name`."""

    def unwrap(self, wrapped: bytes, name: bytes) -> bytes:
        """The key again. Raises `ContentUnreadable`."""


class FileKeys:
    """Wraps by AES-256-GCM under the key in one file."""

    def __init__(self, path: Path) -> None:
        """Read the key (hex of 32 bytes) in `path`; make it if it does not exist."""
        try:
            create_private(path, os.urandom(32).hex().encode() + b"\n")
            self._cipher = AESGCM(bytes.fromhex(path.read_text().strip()))
        except (OSError, ValueError) as exc:
            raise SettingsInvalid(f"content key {path}: {exc}") from exc

    def wrap(self, key: bytes, name: bytes) -> bytes:
        """As `ContentKeys` says."""
        return _seal(self._cipher, key, name)

    def unwrap(self, wrapped: bytes, name: bytes) -> bytes:
        """As `ContentKeys` says."""
        return _open(self._cipher, wrapped, name)


def encrypt(keys: ContentKeys, receipt: str, content: bytes) -> bytes:
    """`content` under a key of its own, which `keys` wraps; bound to the id of its receipt."""
    key, name = AESGCM.generate_key(256), receipt.encode()
    wrapped = keys.wrap(key, name)
    return len(wrapped).to_bytes(4, "big") + wrapped + _seal(AESGCM(key), content, name)


def decrypt(keys: ContentKeys, receipt: str, sealed: bytes) -> bytes:
    """What `encrypt` took. Raises `ContentUnreadable`."""
    size, name = int.from_bytes(sealed[:4], "big"), receipt.encode()
    key = keys.unwrap(sealed[4 : 4 + size], name)
    return _open(AESGCM(key), sealed[4 + size :], name)


def _seal(cipher: AESGCM, plain: bytes, name: bytes) -> bytes:
    nonce = os.urandom(_NONCE)
    return nonce + cipher.encrypt(nonce, plain, name)


def _open(cipher: AESGCM, sealed: bytes, name: bytes) -> bytes:
    try:
        return cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], name)
    except (InvalidTag, ValueError) as exc:
        raise ContentUnreadable("the content cannot be read with this key") from exc
