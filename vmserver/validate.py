# SPDX-License-Identifier: Apache-2.0
"""Checks of values from the wire: each returns the value, or raises InvalidArgument naming the field."""

from __future__ import annotations

import re
from collections.abc import Sequence

from infranetes_common.errors import InvalidArgument

CONTAINER_ID = re.compile(r"[0-9a-z-]{1,64}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

MAX_WORDS = 8192
MAX_WORDS_BYTES = 1024 * 1024
MAX_LAYERS = 512
MAX_SECONDS = 2**31 - 1
MAX_CURSOR = 256
MAX_URL = 4096


def container_id(value: str) -> str:
    """Check a container's id."""
    if not CONTAINER_ID.fullmatch(value):
        raise InvalidArgument(f"id {value[:80]!r}: expected 1 to 64 of 0-9, a-z and -")
    return value


def image_id(value: str) -> str:
    """Check an image's id."""
    if not DIGEST.fullmatch(value):
        raise InvalidArgument(f"image_id {value[:80]!r}: expected sha256: and 64 hex digits")
    return value


def diff_ids(values: Sequence[str]) -> list[str]:
    """Check the diff ids of layers, lowest first."""
    if len(values) > MAX_LAYERS:
        raise InvalidArgument(f"diff_ids: more than {MAX_LAYERS} layers")
    for value in values:
        if not DIGEST.fullmatch(value):
            raise InvalidArgument(f"diff_ids: {value[:80]!r}: expected sha256: and 64 hex digits")
    return list(values)


def size(field: str, value: int, most: int, least: int = 0) -> int:
    """Check a number of bytes, or an offset."""
    if not least <= value <= most:
        raise InvalidArgument(f"{field} {value}: expected {least} to {most} bytes")
    return value


def digest(field: str, value: str) -> str:
    """Check the digest of a file."""
    if not DIGEST.fullmatch(value):
        raise InvalidArgument(f"{field} {value[:80]!r}: expected sha256: and 64 hex digits")
    return value


def words(field: str, values: Sequence[str]) -> list[str]:
    """Check a list of arguments: bounded in number and size, and without what execve refuses."""
    if len(values) > MAX_WORDS or sum(map(len, values)) > MAX_WORDS_BYTES:
        raise InvalidArgument(f"{field}: more than {MAX_WORDS} words or {MAX_WORDS_BYTES} bytes")
    if any("\0" in value for value in values):
        raise InvalidArgument(f"{field}: a word has a NUL byte in it")
    return list(values)


def command(values: Sequence[str]) -> list[str]:
    """Check a command to be run: as `words`, and at least a program."""
    if not values or not values[0]:
        raise InvalidArgument("command: empty; name a program")
    return words("command", values)


def seconds(field: str, value: int) -> int:
    """Check a duration."""
    if not 0 <= value <= MAX_SECONDS:
        raise InvalidArgument(f"{field} {value}: expected 0 to {MAX_SECONDS} seconds")
    return value


def cursor(value: str) -> str:
    """Check a log cursor's length; its meaning is the provider's to check."""
    if len(value) > MAX_CURSOR:
        raise InvalidArgument("cursor: not one of ours")
    return value
