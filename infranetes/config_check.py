# SPDX-License-Identifier: Apache-2.0
"""A check that reports every fault in a configuration file that would keep the daemon from starting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from infranetes.config import Config
from infranetes.config_checks import faults
from infranetes.providers import registry
from infranetes_common import config, config_files
from infranetes_common.config_faults import Fault, located
from infranetes_common.config_files import Document, Sources
from infranetes_common.config_values import MISSING
from infranetes_common.errors import ConfigError

Make = Callable[[Config, str], None]
"""Makes the daemon's parts from a configuration, for their errors. Also takes the file, to name in these."""


def made_of_keys(found: Config, source: str) -> None:
    """Make no parts: check only the configuration's keys."""


def check_file(path: str, make: Make = made_of_keys) -> tuple[Sequence[str], Sequence[Fault]]:
    """Return the files that were read, and their faults. Blocks; nothing outside the process is changed."""
    read = config_files.readable(path)
    document, sources = read.document, read.document.sources
    found = _Faults(sources)
    whole: Config | None = None
    with found.collected():
        whole = config.of_document(document, Config)
    for name in _names(document.table):
        with found.collected():
            _check_table(document, name)
    if read.faults:  # what seems to be missing, or to be contradicted, may be in a file that can't be read
        found.faults = [each for each in found.faults if not each.words.startswith(MISSING)]
        found.faults += located(ConfigError("\n".join(read.faults)), sources)
    elif whole is not None:
        with found.collected():
            _check_whole(whole, sources)
        if not found.faults:
            with found.collected():
                make(whole, sources.main)
    order = {file: number for number, file in enumerate(sources.files)}
    return sources.files, sorted(found.faults, key=lambda each: (order[each.file], each.line))


class _Faults:
    """The faults that were found so far."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.faults: list[Fault] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the faults of a `ConfigError` that is raised within this context."""
        try:
            yield
        except ConfigError as error:
            self.faults += [each for each in located(error, self._sources) if each not in self.faults]


def _names(table: Mapping[str, object]) -> Iterator[str]:
    """Yield the names of the providers that make VMs or have a table, as far as the files have them."""
    handlers = table.get("handlers")
    tables = [table, *(handlers.values() if isinstance(handlers, dict) else ())]
    given = [each.get("provider") for each in tables if isinstance(each, dict)]
    default = () if "provider" in table else (Config().provider,)
    own = table.get("providers")
    named = [*default, *(name for name in given if isinstance(name, str) and name)]
    yield from dict.fromkeys([*named, *(own if isinstance(own, dict) else ())])


def _check_table(document: Document, name: str) -> None:
    """Check a provider's own table. :raise ConfigError: it is wrong."""
    tables = document.table.get("providers", {})
    table = tables.get(name, {}) if isinstance(tables, dict) else {}
    if isinstance(tables, dict) and name in tables and name not in registry.names():
        raise ConfigError(f"{document.sources.main}: providers.{name}: {registry.unknown(name)}")
    if isinstance(table, dict) and (cls := registry.settings_class(name)) is not None:
        config.structure(table, cls, source=document.sources.main, prefix=f"providers.{name}")


def _check_whole(found: Config, sources: Sources) -> None:
    """Check the configuration as a whole. :raise ConfigError: keys contradict each other."""
    if wrong := [f"{sources.main}: {fault}" for fault in faults(found)]:
        raise ConfigError("\n".join(wrong))
