# SPDX-License-Identifier: Apache-2.0
"""A file of one's own prices, for who is offline or has an agreement with the cloud.

It is TOML or JSON, one table: a size's name and its price for an hour::

    "m5.large" = 0.081
    "m5.xlarge" = 0.162
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path

from infranetes_common.errors import ConfigError

_MAX_BYTES = 1 << 20


def read(path: str, key: str) -> Mapping[str, float]:
    """Return the file's prices by sizes' names; none without a file.

    :param key: the configuration's key that names the file, for errors.
    :raise ConfigError: it can't be read, or is none; says what is wrong.
    """
    if not path:
        return {}
    where = f"{key}: {path}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where} can't be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{where} is larger than {_MAX_BYTES >> 20} MiB")
    try:
        text = content.decode()
        table = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is neither TOML nor, by its name, JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: a table of sizes and their prices is expected")
    return {name: _price(where, name, value) for name, value in table.items()}


def _price(where: str, name: str, value: object) -> float:
    if isinstance(value, dict):
        raise ConfigError(f'{where}: {name} is a table: write a name with dots in quotes, "m5.large" = 0.1')
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ConfigError(f"{where}: {name}: the price of an hour is expected, not {value!r}")
    return float(value)
