# SPDX-License-Identifier: Apache-2.0
"""Keys of services that are asked by HTTP: their URL, and the file of headers that each request has."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from attrs import Attribute

from infranetes_common.errors import ConfigError

MAX_HEADERS_BYTES = 64 * 1024

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


def is_url(instance: object, attribute: Attribute[str], value: str) -> None:
    """Refuse what is neither empty nor a URL of HTTP or HTTPS without credentials."""
    if not value:
        return
    try:
        url = urlsplit(value)
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        valid = False
    if not valid or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError("a URL such as http://127.0.0.1:4318/v1/traces is needed")
    if url.username is not None or url.password is not None:
        raise ValueError("a URL without user and password is needed: put credentials into headers_file")


def is_absolute(instance: object, attribute: Attribute[str], value: str) -> None:
    """Refuse what is neither empty nor an absolute path."""
    if value and not os.path.isabs(value):
        raise ValueError(f"{value[:200]!r} is not an absolute path")


def read_headers(path: str, key: str) -> Mapping[str, str]:
    """Read a file of `Name: value` lines. Blocks.

    :param path: "": there is no file, and no header. :param key: that names the file, for messages.
    :raise ConfigError: it can't be read, others may read it, or it is malformed.
        The message never quotes a value."""
    if not path:
        return {}
    key = f"{key}: {path}"
    try:
        mode = Path(path).stat().st_mode & 0o777
        with open(path, "rb") as file:
            content = file.read(MAX_HEADERS_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{key} can't be read: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"{key} may be read by others (mode {mode:04o}): chmod 600 {path}")
    if len(content) > MAX_HEADERS_BYTES:
        raise ConfigError(f"{key} is over {MAX_HEADERS_BYTES} bytes, too long for headers")
    headers = {}
    for number, line in enumerate(content.decode("latin-1").splitlines(), 1):
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not line.strip() or line.startswith("#"):
            continue
        if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ConfigError(f"{key}: line {number}: `Name: value` is needed, printable ASCII")
        headers[name] = value
    return headers
