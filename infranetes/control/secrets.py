# SPDX-License-Identifier: Apache-2.0
"""Secrets, which must not leave a node: values of keys that may be secret, and what looks like one."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping

HIDDEN = "(hidden)"
SHORTEST = 6  # characters; texts are not searched for shorter secrets, which would be in every one

_SECRET_KEY = re.compile(
    r"pass|secret|token|credential|private|auth|key|bearer|certificate.data", re.IGNORECASE
)
_PATH_KEY = re.compile(r"(?:_file|_path|_dir|_endpoint|-file|File|_conf)$")
_PAIR = re.compile(r"""["']?([A-Za-z][\w.-]*)["']?\s*[:=]\s*["']?([^\s"',{}\[\]]+)""")
_LOOKS_SECRET = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?<=://)[^\s/@]+:[^\s/@]+(?=@)"),  # user and password in a URL
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]{8,}"),
    re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"),  # a JSON Web Token
)


def may_be_secret(key: str) -> bool:
    """Return whether a key's value may be a secret, and not merely the path of one."""
    return bool(_SECRET_KEY.search(key)) and not _PATH_KEY.search(key)


def without_secrets(table: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration in which values of keys that may be secret are HIDDEN."""
    return {key: HIDDEN if may_be_secret(key) and value else _hide(value) for key, value in table.items()}


def _hide(value: object) -> object:
    if isinstance(value, dict):
        return without_secrets(value)
    if isinstance(value, list):
        return [_hide(each) for each in value]
    return value


def secrets_of(table: Mapping[str, object]) -> Iterator[str]:
    """Yield the values that `without_secrets` hides."""
    for key, value in table.items():
        if may_be_secret(key):
            yield from _texts(value)
        else:
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, dict):
                    yield from secrets_of(inner)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def secrets_in(text: str) -> Iterator[str]:
    """Yield the secrets in a file: a kubeconfig, an auth.json, credentials, or nothing but a password."""
    for key, value in _PAIR.findall(text):
        if may_be_secret(key):
            yield value
            if key == "auth":  # for a registry: USER:PASSWORD in base64
                yield _password(value)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) == 1:
        yield lines[0]


def paths_in(text: str) -> list[str]:
    """Return the paths of the files with secrets that a kubeconfig names."""
    return [value for key, value in _PAIR.findall(text) if key in ("tokenFile", "client-key")]


def _password(auth: str) -> str:
    try:
        return base64.b64decode(auth, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


class Scrubber:
    """Removes secrets from texts: those that are known, and what looks like one."""

    def __init__(self, known: Iterable[str]) -> None:
        values = {value for value in known if len(value) >= SHORTEST and value != HIDDEN}
        encoded = {base64.b64encode(value.encode()).decode().rstrip("=") for value in values}
        longest_first = sorted(values | encoded, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def clean(self, text: str) -> str:
        """Return the text without secrets."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        for pattern in _LOOKS_SECRET:
            text = pattern.sub(HIDDEN, text)
        return text
