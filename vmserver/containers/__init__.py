# SPDX-License-Identifier: Apache-2.0
"""ContainerProviders, found by the name in the configuration: built in first, then plug-ins.

A plug-in is a distribution with an entry point in the group `vmserver.containers`. The entry point's name is
the provider's, its object a `ProviderFactory`. Only the configured provider is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import attrs
from zope.interface.exceptions import Invalid
from zope.interface.verify import verifyObject

from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor
from vmserver.containers.interface import IContainerProvider

ENTRY_POINT_GROUP = "vmserver.containers"

# The module and attribute of each built-in ProviderFactory.
_BUILT_IN = {
    "docker": "vmserver.containers.docker:create",
    "machine": "vmserver.containers.machine:create",
    "oci": "vmserver.containers.oci:create",
    "systemd": "vmserver.containers.systemd:create",
}

# The packages of this project's own plug-ins.
_PACKAGES = {"fake": "infranetes-simulation"}


@attrs.frozen
class ProviderContext:
    """The directories and the configuration file of the agent that makes a provider."""

    run_dir: Path  # emptied by a reboot; a provider uses the subdirectory of its own name
    etc_dir: Path  # holds the sandbox's hosts, hostname and resolv.conf
    source: str = "configuration"  # the configuration file, for error messages


ProviderFactory = Callable[[IReactor, Mapping[str, object], ProviderContext], IContainerProvider]
"""`factory(reactor, table, context)` makes a provider without starting it, and changes nothing outside the
process. `table` is the provider's own table of the configuration file, not validated yet."""


def names() -> list[str]:
    """Return the names of all providers, sorted."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def create(
    reactor: IReactor, name: str, table: Mapping[str, object], context: ProviderContext
) -> IContainerProvider:
    """Make the provider called `name`, without starting it.

    :raise ConfigError: there is no such provider, it can't be loaded, or its table is wrong.
    """
    provider = _factory(name, context.source)(reactor, table, context)
    try:
        verifyObject(IContainerProvider, provider)
    except Invalid as error:
        reason = str(error).strip()
        raise ConfigError(
            f"provider {name!r} is not an IContainerProvider ({reason}); install another release of it"
        ) from error
    return provider


def _factory(name: str, source: str) -> ProviderFactory:
    try:
        if name in _BUILT_IN:
            module, _, attribute = _BUILT_IN[name].partition(":")
            built_in: ProviderFactory = getattr(import_module(module), attribute)
            return built_in
        points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
        if not points:
            if name in _PACKAGES:
                raise ConfigError(
                    f"{source}: provider: {name!r} is in the package {_PACKAGES[name]}, which is not "
                    "installed; install it"
                )
            raise ConfigError(
                f"{source}: provider: no ContainerProvider is called {name!r}; known are {', '.join(names())}"
            )
        plug_in: ProviderFactory = points[0].load()
        return plug_in
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"ContainerProvider {name!r} can't be loaded: {error}") from error
