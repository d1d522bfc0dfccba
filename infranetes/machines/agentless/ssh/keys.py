# SPDX-License-Identifier: Apache-2.0
"""Keys for SSH: those by which the node proves itself to a guest, and a guest to the node."""

from __future__ import annotations

import base64
import hashlib

import attrs
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from infranetes_common.errors import InvalidArgument
from infranetes_common.ssh_keys import authorized_key


@attrs.frozen
class KeyPair:
    """A key of an SSH user or server, as OpenSSH's files have it.

    :ivar private: the PEM text of a private key's file. :ivar public: the line of its .pub file.
    """

    private: str = attrs.field(repr=False)
    public: str


def make_key(comment: str = "infranetes") -> KeyPair:
    """Make an Ed25519 key, for a user or for a server."""
    return _pair(Ed25519PrivateKey.generate(), comment)


def key_of(seed: bytes, comment: str = "infranetes") -> KeyPair:
    """Return the Ed25519 key of a seed of 32 bytes: always the same."""
    return _pair(Ed25519PrivateKey.from_private_bytes(seed), comment)


def _pair(key: Ed25519PrivateKey, comment: str) -> KeyPair:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return KeyPair(private.decode(), f"{public.decode()} {comment}")


def key_blob(line: str) -> bytes:
    """Return the bytes of a public key as SSH sends them.

    :param line: as in `KeyPair.public`. :raise InvalidArgument: it is none."""
    try:
        words = authorized_key(line).split()
    except ValueError as error:
        raise InvalidArgument(f"an SSH public key can't be read: {error}") from None
    kinds = [index for index, word in enumerate(words) if word.startswith(("ssh-", "ecdsa-", "sk-"))]
    return base64.b64decode(words[kinds[0] + 1])


def key_line(blob: bytes) -> str:
    """Return the line of a public key, without a comment."""
    return f"{key_type(blob).decode()} {base64.b64encode(blob).decode()}"


def key_type(blob: bytes) -> bytes:
    """Return the type of a public key, such as b"ssh-ed25519"."""
    return blob[4 : 4 + int.from_bytes(blob[:4], "big")]


def fingerprint(blob: bytes) -> str:
    """Return what people compare of a key, as ssh-keygen prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
