# SPDX-License-Identifier: Apache-2.0
"""A file of one's own prices, for a node that is offline or an account with an agreement with the cloud.

It is TOML or JSON, one table: a size's name and its price for an hour::

    "m5.large" = 0.081
    "m5.xlarge" = 0.162

It is read again when it has changed. If it is wrong then, the previous prices stay in use.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from twisted.logger import Logger

from infranetes_common.concurrency import run_in_thread, sleep
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor

LOOK_SECONDS = 30.0  # between two looks at the file
_MAX_BYTES = 1 << 20

_log = Logger()


class OwnPrices:
    """The prices of a file.

    :param path: "": there is none. :param key: the configuration's key that names it, for errors.
    :raise ConfigError: it can't be read, or is malformed; the message says what is wrong.
    :ivar prices: by sizes' names.
    """

    def __init__(self, path: str, key: str) -> None:
        self._path = path
        self._key = key
        self._users: list[Callable[[Mapping[str, float]], None]] = []
        self._version = _version(path)
        self.prices = read(path, key)

    def tell(self, user: Callable[[Mapping[str, float]], None]) -> None:
        """Call `user` with the prices whenever they have changed."""
        self._users.append(user)

    async def follow(self, reactor: IReactor) -> None:
        """Look at the file again and again, until cancelled."""
        while self._path:
            await sleep(reactor, LOOK_SECONDS)
            try:
                prices = await run_in_thread(reactor, self._thd_changed)
            except ConfigError as error:
                _log.warn("{error}; the earlier prices stay in use", error=error)
                continue
            if prices is None or prices == self.prices:
                continue
            self.prices = prices
            _log.info("{path} was read again: {count} prices", path=self._path, count=len(prices))
            for user in self._users:
                user(prices)

    def _thd_changed(self) -> Mapping[str, float] | None:
        """Read the file if it has changed. :raise ConfigError: it is wrong; raised once for each change."""
        version = _version(self._path)
        if version == self._version:
            return None
        self._version = version
        return read(self._path, self._key)


def _version(path: str) -> tuple[int, ...]:
    """Return values that change whenever a file does; empty: it can't be looked at."""
    try:
        found = Path(path).stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def read(path: str, key: str) -> Mapping[str, float]:
    """Return the file's prices by sizes' names; none without a file.

    :param key: the configuration's key that names the file, for errors.
    :raise ConfigError: it can't be read, or is malformed; the message says what is wrong.
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
