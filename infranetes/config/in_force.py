# SPDX-License-Identifier: Apache-2.0
"""The configuration in force in a running daemon: each key, its value's origin, and pending changes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping

import attrs

from infranetes.config.reading import COMMAND_LINE, Reading
from infranetes.config.schema import Config
from infranetes.providers.registry import settings_class
from infranetes_common import config_text
from infranetes_common.config import structure
from infranetes_common.config_files import Place
from infranetes_common.config_text import Setting
from infranetes_common.errors import ConfigError

HIDDEN = "(secret)"


@attrs.frozen
class Origin:
    """The origin of a value. With neither field set, the value is the default.

    :ivar flag: it is from the command line. :ivar place: the file and line that it is from."""

    flag: bool = False
    place: Place | None = None

    def __str__(self) -> str:
        return COMMAND_LINE if self.flag else str(self.place or "default")


@attrs.frozen
class Waiting:
    """A key's value after the next restart of the daemon. :ivar setting: None if the key will be gone."""

    setting: Setting | None
    origin: Origin


@attrs.frozen
class InForce:
    """A key as it is in force. :ivar setting: None if the key only appears after a restart.

    :ivar reloaded: True if the daemon was started with another value.
    :ivar waiting: None if the value in force is the one that was read last."""

    key: str
    setting: Setting | None
    origin: Origin
    reloaded: bool
    waiting: Waiting | None


@attrs.frozen
class Snapshot:
    """The state of the configuration at one moment.

    :ivar started: as the daemon was started. :ivar read: as it was last read.
    :ivar running: as it is in force. :ivar read_at: time of the last reload, seconds since 1970; 0 if none.
    :ivar trouble: why the last reload changed nothing; "" if it didn't fail."""

    started: Reading
    read: Reading
    running: Config
    read_at: float = 0.0
    trouble: str = ""

    def entries(self) -> Iterator[InForce]:
        """Yield every key, in the order of the configuration classes. Blocks: it may import a plug-in."""
        started, now = _by_key(self.started.config), _by_key(self.running)
        read = _by_key(self.read.config)
        for key in [*now, *(key for key in read if key not in now)]:
            setting, latest = now.get(key), read.get(key)
            waits = _value(setting) != _value(latest)
            origin = _origin(self.started if waits else self.read, key)
            waiting = Waiting(latest, _origin(self.read, key)) if waits else None
            yield InForce(key, setting, origin, _value(setting) != _value(started.get(key)), waiting)

    def shown(self) -> Mapping[str, object]:
        """Return the values by key, as JSON has them, without secrets. Blocks likewise."""
        return {each.key: plain(each.setting) for each in self.entries() if each.setting is not None}


class ConfigInForce:
    """Keeps the snapshot that is true now."""

    def __init__(self, started: Reading) -> None:
        self.now = Snapshot(started, started, started.config)

    def take(self, read: Reading, running: Config, at: float) -> None:
        """Remember a reload, after which `running` is in force."""
        self.now = Snapshot(self.now.started, read, running, at)

    def refuse(self, why: str) -> None:
        """Remember a reload that did nothing."""
        self.now = attrs.evolve(self.now, trouble=why)


def plain(setting: Setting) -> object:
    """Return a value as JSON has it; a secret is not shown. None: there is no value."""
    if setting.secret:
        return HIDDEN if setting.value else ""
    return tomllib.loads(f"value = {setting.shown}")["value"] if setting.shown else None


def _value(setting: Setting | None) -> object:
    return setting.value if setting is not None else None


def _origin(reading: Reading, key: str) -> Origin:
    return Origin(key in reading.flags, reading.sources.places.get(key))


def _by_key(config: Config) -> dict[str, Setting]:
    """Return all keys: those of `Config`, and those of the tables of providers that make VMs."""
    found = {each.key: each for each in config_text.settings(attrs.evolve(config, providers={}))}
    del found["providers"]
    for name in config.offered_providers:
        found.update((each.key, each) for each in _of_provider(name, config.providers.get(name, {})))
    return found


def _of_provider(name: str, table: Mapping[str, object]) -> Iterator[Setting]:
    prefix = f"providers.{name}"
    cls = settings_class(name)
    try:
        if cls is not None:
            yield from config_text.settings(structure(table, cls, source="", prefix=prefix), f"{prefix}.")
            return
    except ConfigError:  # a plug-in whose class does not fit its table
        pass
    for key, value in table.items():  # any value may be a secret
        yield Setting(f"{prefix}.{key}", value, "", secret=True)
