# SPDX-License-Identifier: Apache-2.0
"""Checks of a configuration as a whole, in addition to those of its single keys."""

from __future__ import annotations

from infranetes.config import Config
from infranetes.daemon.backends import make_backends
from infranetes.daemon.csi import no_volumes, volumes_of
from infranetes.daemon.handlers import check_overlays, check_pools
from infranetes.providers import registry
from infranetes_common.reactors import IReactor


def check_daemon(reactor: IReactor, config: Config, source: str) -> None:
    """Check it. Nothing outside the process is changed.

    :param source: the configuration's file, which errors name.
    :raise ConfigError: no daemon can be made of it."""
    providers = make_backends(reactor, config, registry.create, source).providers
    check_overlays(config, providers, source)
    check_pools(config, providers, source)
    if config.csi.kubelet_dir and volumes_of(providers) is None:
        raise no_volumes(providers, source)
