# SPDX-License-Identifier: Apache-2.0
"""A check that reports every fault in a configuration file, and in what it names on this machine.

What the check did not look at is told too: a file is right only if all was looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs

from infranetes.config.rules import faults
from infranetes.config.schema import Config
from infranetes.providers import registry
from infranetes_common import config, config_files
from infranetes_common.config_faults import Fault, located
from infranetes_common.config_files import Document, Place, Sources
from infranetes_common.config_outside import Finding, Verdict, looked_at, named, unseen
from infranetes_common.config_values import MISSING
from infranetes_common.errors import ConfigError

Make = Callable[[Config, str], None]
"""Makes the daemon's parts from a configuration, for their errors. Also takes the file, to name in these."""


def made_of_keys(config: Config, source: str) -> None:
    """Make no parts: check only the configuration's keys."""


@attrs.frozen
class Checked:
    """What came of a check, each in the order of files and lines.

    :ivar files: those that were read. :ivar faults: what is wrong.
    :ivar warnings: what works, but worse than it may be meant to, or not yet.
    :ivar unseen: what was not looked at, and why."""

    files: Sequence[str]
    faults: Sequence[Fault]
    warnings: Sequence[Fault]
    unseen: Sequence[Fault]


def check_file(path: str, make: Make = made_of_keys, elsewhere: bool = False) -> Checked:
    """Check the file at `path` and its drop-ins. Blocks; nothing outside the process is changed.

    :param elsewhere: the file is for another machine: what it names is not looked for on this one."""
    read = config_files.readable(path)
    document, sources = read.document, read.document.sources
    found = _Faults(sources)
    said: list[Finding] = []
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
        away = {said.key for said in _away(whole, document)} if elsewhere else frozenset()
        if not found.faults:
            with found.collected():
                make(whole, sources.main)
            found.faults = [fault for fault in found.faults if fault.key not in away]
        told = {fault.key for fault in found.faults}
        said = [each for each in (_away if elsewhere else _findings)(whole, document) if each.key not in told]
        found.faults += _of(said, Verdict.WRONG, sources)
    order = {file: number for number, file in enumerate(sources.files)}

    def in_order(faults: Iterable[Fault]) -> list[Fault]:
        placed = (_placed(each, document) for each in faults)
        return sorted(placed, key=lambda each: (order[each.file], each.line))

    return Checked(
        sources.files,
        in_order(found.faults),
        in_order(_of(said, Verdict.WARNING, sources)),
        in_order(_of(said, Verdict.UNSEEN, sources)),
    )


def _away(whole: Config, document: Document) -> Iterator[Finding]:
    """Yield that what the files name is not looked at, since it is elsewhere."""
    places = document.sources.places.keys()
    keys = list(named(whole, places))
    for name in whole.offered_providers:
        if (table := _settings(whole, name)) is not None:
            keys += named(table, places, f"providers.{name}")
    yield from (unseen("it is on the machine that the file is for", key) for key in keys)


def _findings(whole: Config, document: Document) -> Iterator[Finding]:
    """Yield what is said of all that the files name outside of them."""
    places = document.sources.places.keys()
    yield from looked_at(whole, places)
    for name in _names(document.table):
        key = f"providers.{name}"
        if name not in whole.offered_providers:
            yield unseen("no pod has its VM from this provider, so that only its keys were looked at", key)
        elif registry.settings_class(name) is None:
            yield unseen(
                "its plug-in does not tell which keys it has, so that it alone can look at them", key
            )
        elif (table := _settings(whole, name)) is not None:
            try:
                yield from looked_at(table, places, key)
            except ImportError as error:
                yield unseen(f"it can't be loaded here: {error}", key)


def _settings(whole: Config, name: str) -> attrs.AttrsInstance | None:
    """Return a provider's table; None: it is wrong, which is told already, or its keys are not known."""
    cls = registry.settings_class(name)
    try:
        return None if cls is None else config.structure(whole.providers.get(name, {}), cls, source="")
    except ConfigError:
        return None


def _placed(fault: Fault, document: Document) -> Fault:
    """Return a fault of a provider whose table is nowhere with the place at which the provider is named."""
    names = fault.key.split(".")
    if fault.line or names[0] != "providers" or len(names) < 2:
        return fault
    handlers = document.table.get("handlers")
    its = handlers if isinstance(handlers, dict) else {}
    for key in ("provider", *(f"handlers.{name}.provider" for name in its)):
        place = document.sources.places.get(key)
        if place is not None and config_files.value_of(document.table, key) == names[1]:
            return attrs.evolve(fault, file=place.file, line=place.line)
    return fault


def _of(said: Iterable[Finding], verdict: Verdict, sources: Sources) -> list[Fault]:
    """Return what has a verdict, with its place."""
    placed = ((each, sources.place_of(each.key) or Place(sources.main, 0)) for each in said)
    return [
        Fault(place.file, place.line, each.key, each.words)
        for each, place in placed
        if each.verdict is verdict
    ]


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
    used = [*default, *(name for name in given if isinstance(name, str) and name)]
    theirs = own if isinstance(own, dict) else {}
    yield from dict.fromkeys([*used, *(name for name, its in theirs.items() if isinstance(its, dict))])


def _check_table(document: Document, name: str) -> None:
    """Check a provider's own table. :raise ConfigError: it is wrong."""
    tables = document.table.get("providers", {})
    table = tables.get(name, {}) if isinstance(tables, dict) else {}
    if isinstance(tables, dict) and name in tables and name not in registry.names():
        raise ConfigError(f"{document.sources.main}: providers.{name}: {registry.unknown(name)}")
    if isinstance(table, dict) and (cls := registry.settings_class(name)) is not None:
        prefix = f"providers.{name}"
        config.structure(table, cls, source=document.sources.main, prefix=prefix, whole=Config)


def _check_whole(found: Config, sources: Sources) -> None:
    """Check the configuration as a whole. :raise ConfigError: keys contradict each other."""
    if wrong := [f"{sources.main}: {fault}" for fault in faults(found)]:
        raise ConfigError("\n".join(wrong))
