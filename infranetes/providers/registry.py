# SPDX-License-Identifier: Apache-2.0
"""Find pod providers by their names in the configuration: built-in ones first, then plug-ins.

A plug-in is a distribution with an entry point in the group `infranetes.providers`. The entry point has the
provider's name and refers to a `ProviderFactory`. A provider is imported only when its name is asked for, so
the dependencies of one are not needed for another. One whose libraries are missing says how to install them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

import attrs
from twisted.logger import Logger
from zope.interface.exceptions import Invalid
from zope.interface.verify import verifyObject

from infranetes.providers import libraries
from infranetes.providers.interface import IPodProvider, ProviderContext
from infranetes.providers.tenants import in_words_of, merged, split, tables
from infranetes_common.errors import ConfigError, InfranetesError
from infranetes_common.reactors import IReactor

__all__ = ["ENTRY_POINT_GROUP", "ProviderContext", "ProviderFactory", "create", "names"]

ENTRY_POINT_GROUP = "infranetes.providers"

ProviderFactory = Callable[[IReactor, Mapping[str, object], ProviderContext], IPodProvider]
"""`factory(reactor, table, context)` makes a provider, which is not started yet.

`table` is the provider's own table of the configuration file, unchecked: the factory structures it
(`infranetes_common.config`) and raises a `ConfigError` that names the wrong key. It has no effect outside the
process."""

# The factory of each built-in provider, as module:attribute.
_BUILT_IN: dict[str, str] = {
    "aws": "infranetes.providers.cloud.aws.factory:create",
    "azure": "infranetes.providers.cloud.azure.factory:create",
    "gcp": "infranetes.providers.cloud.gcp.factory:create",
    "libcloud": "infranetes.providers.cloud.any.factory:create",
    "openstack": "infranetes.providers.cloud.openstack.factory:create",
    "qemu": "infranetes.providers.qemu:create",
    "vsphere": "infranetes.providers.cloud.vsphere.factory:create",
}

SETTINGS_GROUP = "infranetes.provider_settings"
"""Entry points of this group are named as providers, and refer to the attrs class of the provider's table, so
that all its keys can be shown. A plug-in need not have one."""

# The attrs class of each built-in provider's table, as module:attribute.
_SETTINGS: dict[str, str] = {
    "aws": "infranetes.providers.cloud.aws.settings:Settings",
    "azure": "infranetes.providers.cloud.azure.settings:Settings",
    "gcp": "infranetes.providers.cloud.gcp.settings:Settings",
    "libcloud": "infranetes.providers.cloud.any.settings:Settings",
    "openstack": "infranetes.providers.cloud.openstack.settings:Settings",
    "qemu": "infranetes.providers.qemu.settings:QemuSettings",
    "vsphere": "infranetes.providers.cloud.vsphere.settings:Settings",
}

# The packages of the plug-ins that are this project's own.
_PACKAGES = {"simulated": "infranetes-simulation"}

_log = Logger()


def names() -> list[str]:
    """List the names of all providers, sorted."""
    return sorted({*_BUILT_IN, *(point.name for point in _plug_ins())})


def create(
    reactor: IReactor, name: str, table: Mapping[str, object], context: ProviderContext
) -> IPodProvider:
    """Make the provider called `name`, which may be one's tenant. It is not started yet.

    :param table: the provider's, with those of its tenants.

    :raise ConfigError: there is no such provider, it can't be loaded, or its table is wrong.
    """
    provider_name, tenant = split(name)
    factory = _factory(provider_name, context.source)
    its_own = table
    if tenant:
        if tenant not in tables(table):
            raise ConfigError(
                f"{context.source}: providers.{provider_name}.tenants: there is no {tenant!r} any more"
            )
        its_own, state_dir = merged(table, tenant), context.state_dir / provider_name / "tenants" / tenant
        context = attrs.evolve(context, tenant=tenant, state_dir=state_dir)
    try:
        provider = factory(reactor, its_own, context)
    except ConfigError as error:
        raise ConfigError(in_words_of(tenant, table, provider_name, str(error))) from error
    except InfranetesError:
        raise
    except Exception as error:
        _log.failure("provider {provider} failed when it was made", provider=name)
        raise ConfigError(
            f"{context.source}: provider: {name!r} can't be made: {type(error).__name__}: {error}; the log "
            "has the traceback"
        ) from error
    try:
        verifyObject(IPodProvider, provider)
    except Invalid as error:
        raise ConfigError(
            f"{context.source}: provider: {name!r} is not an IPodProvider ({str(error).strip()}); "
            "install a release of it that is made for this Infranetes"
        ) from error
    return provider


def unknown(name: str) -> str:
    """Return the words for a name that no provider has."""
    known = names()
    close = "".join(f"; did you mean {each}?" for each in difflib.get_close_matches(name.lower(), known, n=1))
    return f"no provider is called {name!r}{close or '; known are ' + ', '.join(known)}"


def settings_class(name: str) -> type[attrs.AttrsInstance] | None:
    """Return the attrs class of a provider's table; None: it has no such entry point, or is not installed."""
    if name in _SETTINGS:
        found = _attribute(_SETTINGS[name])
    else:
        points = [point for point in entry_points(group=SETTINGS_GROUP) if point.name == name]
        if len({point.value for point in points}) != 1:
            return None
        try:
            found = points[0].load()
        except ModuleNotFoundError:  # it is in a package that is not installed, as Debian's may be
            return None
        except Exception:
            _log.failure("the settings of provider {provider} can't be loaded", provider=name)
            return None
    return found if isinstance(found, type) and attrs.has(found) else None


def _plug_ins() -> list[EntryPoint]:
    return sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value))


def _factory(name: str, source: str) -> ProviderFactory:
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        return _load(name, built_in, lambda: _attribute(built_in), source)
    found = [point for point in _plug_ins() if point.name == name]
    if not found:
        if name in _PACKAGES:
            raise ConfigError(
                f"{source}: provider: {name!r} is in the package {_PACKAGES[name]}, which is not installed; "
                "install it"
            )
        raise ConfigError(f"{source}: provider: {unknown(name)}")
    if len({point.value for point in found}) > 1:
        raise ConfigError(
            f"{source}: provider: several plug-ins are called {name!r} "
            f"({', '.join(point.value for point in found)}); uninstall all but one"
        )
    return _load(name, found[0].value, found[0].load, source)


def _attribute(target: str) -> object:
    module, _, attribute = target.partition(":")
    found: object = getattr(import_module(module), attribute)
    return found


def _load(name: str, target: str, load: Callable[[], object], source: str) -> ProviderFactory:
    try:
        return cast(ProviderFactory, load())
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (lacking := libraries.missing(name, error)):
            raise ConfigError(f"{source}: provider: {name!r} can't be loaded: {lacking}") from None
        _log.failure("provider {provider} can't be imported from {target}", provider=name, target=target)
        raise ConfigError(
            f"{source}: provider: {name!r} can't be loaded from {target}: {type(error).__name__}: {error}"
        ) from error
