"""PodProviders by the name that the configuration gives: built in first, then plug-ins.

A plug-in is a distribution with an entry point in the group `infranetes.providers`, whose name is
the provider's and whose object is a `ProviderFactory`. Nothing of a provider is imported before its
name is asked for, so what one provider lacks harms no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from twisted.logger import Logger
from zope.interface.exceptions import Invalid
from zope.interface.verify import verifyObject

from infranetes.providers.interface import IPodProvider, ProviderContext
from infranetes_common.errors import ConfigError, InfranetesError

__all__ = ["ENTRY_POINT_GROUP", "ProviderContext", "ProviderFactory", "create", "names"]

ENTRY_POINT_GROUP = "infranetes.providers"

ProviderFactory = Callable[[Any, Mapping[str, Any], ProviderContext], IPodProvider]
"""`factory(reactor, table, context)`: a provider, not yet started. `table` is the provider's own table
of the configuration file, unchecked; the factory structures it (`infranetes_common.config`) and raises
`ConfigError` naming the key. It touches nothing outside the process."""

# module:attribute of each built-in ProviderFactory
_BUILT_IN: dict[str, str] = {
    "aws": "infranetes.providers.cloud.aws:create",
    "gcp": "infranetes.providers.cloud.gcp:create",
    "qemu": "infranetes.providers.qemu:create",
    "simulated": "infranetes.providers.simulated:create",
    "vsphere": "infranetes.providers.cloud.vsphere:create",
}

_log = Logger()


def names() -> list[str]:
    """Every name that `create` knows, sorted."""
    return sorted({*_BUILT_IN, *(point.name for point in _plug_ins())})


def create(reactor: Any, name: str, table: Mapping[str, Any], context: ProviderContext) -> IPodProvider:
    """The provider called `name`, not yet started.

    :raise ConfigError: nothing has this name, it can't be loaded, or its table is wrong.
    """
    factory = _factory(name)
    try:
        provider = factory(reactor, table, context)
    except InfranetesError:
        raise
    except Exception as error:
        _log.failure("provider {provider} failed when it was made", provider=name)
        raise ConfigError(
            f"provider {name!r} can't be made: {type(error).__name__}: {error}; the log has the traceback"
        ) from error
    try:
        verifyObject(IPodProvider, provider)
    except Invalid as error:
        raise ConfigError(
            f"provider {name!r} is not an IPodProvider ({str(error).strip()}); "
            "install a release of it that is made for this Infranetes"
        ) from error
    return provider


def _plug_ins() -> list[EntryPoint]:
    return sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value))


def _factory(name: str) -> ProviderFactory:
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        return _load(name, built_in, lambda: _attribute(built_in))
    found = [point for point in _plug_ins() if point.name == name]
    if not found:
        raise ConfigError(f"no provider is called {name!r}; known are {', '.join(names())}")
    if len({point.value for point in found}) > 1:
        raise ConfigError(
            f"several plug-ins are called {name!r} ({', '.join(point.value for point in found)}); "
            "uninstall all but one"
        )
    return _load(name, found[0].value, found[0].load)


def _attribute(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def _load(name: str, target: str, load: Callable[[], Any]) -> ProviderFactory:
    try:
        factory: ProviderFactory = load()
    except Exception as error:
        _log.failure("provider {provider} can't be imported from {target}", provider=name, target=target)
        raise ConfigError(
            f"provider {name!r} can't be loaded from {target}: {type(error).__name__}: {error}"
        ) from error
    return factory
