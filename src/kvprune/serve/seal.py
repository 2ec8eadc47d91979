"""Snapshots as the bytes of a file: in the clear with a checksum, or encrypted.

    in the clear   "kvprune stored 1 plain\\n", SHA-256 of name and data, data
    encrypted      "kvprune stored 1 aes-256-gcm\\n", nonce (12 bytes), ciphertext, tag (16 bytes)

The key of AES-256-GCM is HKDF-SHA256 of the secret, so is the one that names are made with
(HMAC-SHA256): they tell nothing of the text. The first line and the name are authenticated too.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from kvprune.errors import PruneError

PLAIN, ENCRYPTED = b"kvprune stored 1 plain\n", b"kvprune stored 1 aes-256-gcm\n"
NONCE, DIGEST = 12, 32
SHORTEST_SECRET = 32
VARIABLE = "KVPRUNE_SNAPSHOT_KEY"


class Damaged(Exception):
    """These are not the bytes that were written under this name, or not with this key."""


class Seal:
    def __init__(self, secret: str | None = None):
        """`secret`: at least 32 characters, as random as a key: it is not made for passwords."""
        self._key, self._name_key = None, b""
        if secret is None:
            return
        if len(secret) < SHORTEST_SECRET:
            raise PruneError(
                f"{VARIABLE} has {len(secret)} characters and needs {SHORTEST_SECRET}; make one "
                f"with: openssl rand -hex 32"
            )
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise PruneError(
                "encrypted snapshots need cryptography: pip install 'kvprune[snapshots]'"
            ) from error
        self._key = AESGCM(_derive(secret, b"encrypt"))
        self._name_key = _derive(secret, b"name")

    @property
    def encrypts(self) -> bool:
        return self._key is not None

    def name(self, data: bytes) -> str:
        """A file's name for what it is found by."""
        return hmac.new(self._name_key, data, hashlib.sha256).hexdigest()

    def close(self, name: str, data: bytes) -> bytes:
        if self._key is None:
            return b"".join((PLAIN, _checksum(name, data), data))
        nonce = os.urandom(NONCE)
        sealed = self._key.encrypt(nonce, data, ENCRYPTED + name.encode())
        return b"".join((ENCRYPTED, nonce, sealed))

    def open(self, name: str, sealed: bytes) -> bytes:
        """What was closed under this name; `Damaged` if anything about it is not as it was."""
        first = PLAIN if self._key is None else ENCRYPTED
        if not sealed.startswith(first):
            raise Damaged("it is no snapshot, or not encrypted as the others are")
        start = len(first)
        if self._key is None:
            data = sealed[start + DIGEST :]
            if sealed[start : start + DIGEST] != _checksum(name, data):
                raise Damaged("its checksum is wrong")
            return data
        from cryptography.exceptions import InvalidTag

        nonce, body = sealed[start : start + NONCE], sealed[start + NONCE :]
        try:
            return self._key.decrypt(nonce, body, ENCRYPTED + name.encode())
        except (InvalidTag, ValueError):
            raise Damaged(f"it was changed, or {VARIABLE} is another") from None


def _checksum(name: str, data: bytes) -> bytes:
    return hashlib.sha256(name.encode() + data).digest()


def _derive(secret: str, purpose: bytes) -> bytes:
    """HKDF-SHA256 without salt, 32 bytes (RFC 5869)."""
    key = hmac.new(bytes(32), secret.encode(), hashlib.sha256).digest()
    return hmac.new(key, b"kvprune snapshots 1 " + purpose + b"\x01", hashlib.sha256).digest()
