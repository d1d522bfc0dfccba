# SPDX-License-Identifier: Apache-2.0
"""Handlers and their pools, made of the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infranetes.config import Config
from infranetes.config.schema import ADDRESSING
from infranetes.delegate.node_images import NodeImages
from infranetes.images.several import SeveralStores
from infranetes.machines.pool import Pool
from infranetes.machines.pool_config import PoolConfig
from infranetes.machines.pool_record import PoolRecord
from infranetes.machines.pooled import Purpose, check_stops
from infranetes.pods.node.handler_config import SYSTEMD, HandlerConfig
from infranetes.pods.node.handlers import AnnotationRule, Handler, Handlers
from infranetes.pods.node.images import Images
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.node.pools import Pools
from infranetes.providers.interface import IInVpc, IPodProvider
from infranetes.providers.tenants import all_tenants
from infranetes_common.errors import ConfigError, InvalidArgument


def make_handlers(
    providers: Providers, images: Images, config: Config, source: str
) -> tuple[Handlers, Pools]:
    """Return the configured handlers and all pools of a node.

    :param source: the configuration's file, which errors name.
    :raise ConfigError: a handler's network can't be had, or a pool's VMs can't wait stopped."""
    check_pools(config, [node_provider.provider for node_provider in providers], source)
    by_name = {name: _make(providers, config, name, source) for name in ("", *config.offered_handlers)}
    own = Pool(providers.own, config.pool)
    pools = Pools(own, [handler.pool for handler in by_name.values() if handler.pool is not None])
    every = all_tenants({name: config.providers.get(name, {}) for name in config.offered_providers})
    handlers = Handlers(
        by_name,
        providers,
        pools,
        config.contprovider,
        config.kubernetes.network,
        tenants={tenants.provider: tenants for tenants in every},
        image_source=images.source if isinstance(images, SeveralStores | NodeImages) else None,
    )
    return handlers, pools


def _make(providers: Providers, config: Config, name: str, source: str) -> Handler:
    handler = config.handlers.get(name, HandlerConfig())
    node_provider, kind = providers.by_name[config.node_provider_of(name)], config.kind_of(name)
    if handler.network == "overlay" and node_provider.overlay is None:
        raise _no_overlay(name, node_provider.name, source)
    contprovider = handler.contprovider
    if kind == SYSTEMD != config.kind:  # its VMs would run containers by default
        contprovider = SYSTEMD
    rule = AnnotationRule(name, handler.annotations.set, handler.annotations.allow)
    pool = None
    if handler.pool.sizes:
        pool = Pool(node_provider, handler.pool, Purpose(name, handler.annotations.set, contprovider))
    network, size = handler.network, handler.size
    return Handler(name, node_provider, kind, contprovider, network, size, rule, pool, handler.tenant)


def check_overlays(config: Config, providers: Sequence[IPodProvider], source: str) -> None:
    """Check that handlers whose network is the overlay can have it, before there is a node.

    :raise ConfigError: one can't."""
    by_name = {provider.name: provider for provider in providers}
    addressed = any(name in ADDRESSING for name in by_name)
    for name, handler in config.handlers.items():
        provider = by_name[config.provider_of(name)]
        if handler.network == "overlay" and (addressed or not IInVpc.providedBy(provider)):
            raise _no_overlay(name, provider.name, source)


def check_pools(config: Config, providers: Sequence[IPodProvider], source: str) -> None:
    """Check that VMs that are to wait stopped can do so, before there is a node.

    :raise ConfigError: they can't."""
    by_name = {provider.name: provider for provider in providers}
    pools = [("pool", config.pool, config.node_provider_of(""), dict[str, str]())]
    pools += [
        (f"handlers.{name}.pool", handler.pool, config.node_provider_of(name), dict(handler.annotations.set))
        for name, handler in config.handlers.items()
    ]
    for key, pool, provider, set_annotations in pools:
        if pool.stops:
            try:
                check_stops(by_name[provider], set_annotations)
            except InvalidArgument as error:
                raise ConfigError(f"{source}: {key}.sizes: stopped: {error}") from None


def _no_overlay(handler: str, provider: str, source: str) -> ConfigError:
    return ConfigError(
        f"{source}: handlers.{handler}.network: provider {provider!r} can't give pods addresses of "
        "an overlay on this node, because the node's subnet belongs to another provider; leave it out"
    )


def pools_with(
    pools: Pools, providers: Providers, records: Iterable[PoolRecord]
) -> list[tuple[Pool, list[PoolRecord]]]:
    """Return every pool with its records. Records of no pool get one that wants no VMs: their VMs end."""
    by_key = {(pool.context.provider.name, pool.purpose.handler): pool for pool in pools.all()}
    loads: dict[tuple[str, str], list[PoolRecord]] = {key: [] for key in by_key}
    for record in records:
        key = (record.provider, record.handler)
        if key not in by_key:
            by_key[key] = Pool(providers.by_name[key[0]], PoolConfig(), Purpose(record.handler))
            pools.others.append(by_key[key])
        loads.setdefault(key, []).append(record)
    return [(by_key[key], loads[key]) for key in by_key]
