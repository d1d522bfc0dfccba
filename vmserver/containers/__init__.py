"""ContainerProviders by the name that the configuration gives: built in first, then plug-ins.

A plug-in is a distribution with an entry point in the group `vmserver.containers`, whose name is the
provider's and whose object is a `ProviderFactory`. Only the provider asked for is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs
from zope.interface.exceptions import Invalid
from zope.interface.verify import verifyObject

from infranetes_common.errors import ConfigError
from vmserver.containers.interface import IContainerProvider

ENTRY_POINT_GROUP = "vmserver.containers"

# module:attribute of each built-in ProviderFactory
_BUILT_IN = {
    "docker": "vmserver.containers.docker:create",
    "fake": "vmserver.containers.fake:create",
    "machine": "vmserver.containers.machine:create",
    "systemd": "vmserver.containers.systemd:create",
}


@attrs.frozen
class ProviderContext:
    """Where a provider lives; given to it when it is made."""

    run_dir: Path  # the agent's, gone after a reboot; a provider uses the subdirectory of its own name
    etc_dir: Path  # where hosts and resolv.conf of the sandbox are


ProviderFactory = Callable[[Any, Mapping[str, Any], ProviderContext], IContainerProvider]
"""`factory(reactor, table, context)`: a provider, not yet started. `table` is the provider's own table
of the configuration file, unchecked. It touches nothing outside the process."""


def names() -> list[str]:
    """Every name that `create` knows, sorted."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def create(reactor: Any, name: str, table: Mapping[str, Any], context: ProviderContext) -> IContainerProvider:
    """The provider called `name`, not yet started.

    :raise ConfigError: nothing has this name, it can't be loaded, or its table is wrong.
    """
    provider = _factory(name)(reactor, table, context)
    try:
        verifyObject(IContainerProvider, provider)
    except Invalid as error:
        words = str(error).strip()
        raise ConfigError(
            f"provider {name!r} is not an IContainerProvider ({words}); install another release of it"
        ) from error
    return provider


def _factory(name: str) -> ProviderFactory:
    try:
        if name in _BUILT_IN:
            module, _, attribute = _BUILT_IN[name].partition(":")
            built_in: ProviderFactory = getattr(import_module(module), attribute)
            return built_in
        points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
        if not points:
            raise ConfigError(f"no ContainerProvider is called {name!r}; known are {', '.join(names())}")
        plug_in: ProviderFactory = points[0].load()
        return plug_in
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"ContainerProvider {name!r} can't be loaded: {error}") from error
