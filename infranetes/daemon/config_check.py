# SPDX-License-Identifier: Apache-2.0
"""Checks of a configuration as a whole, in addition to those of its single keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from infranetes.authority import Authority
from infranetes.config import Config
from infranetes.daemon.backends import make_backends
from infranetes.daemon.csi import no_volumes, volumes_of
from infranetes.daemon.handlers import check_overlays
from infranetes.kubernetes.kubeconfig import thd_read
from infranetes.providers import registry
from infranetes_common.errors import ConfigError, InfranetesError
from infranetes_common.reactors import IReactor


def check_daemon(reactor: IReactor, config: Config, source: str) -> None:
    """Check it. Nothing outside the process is changed.

    :param source: the configuration's file, which errors name.
    :raise ConfigError: no daemon can be made of it."""
    if wrong := [f"{source}: {fault}" for fault in _of_files(config)]:
        raise ConfigError("\n".join(wrong))
    providers = make_backends(reactor, config, registry.create, source).providers
    check_overlays(config, providers, source)
    if config.csi.kubelet_dir and volumes_of(providers) is None:
        raise no_volumes(providers, source)


def _of_files(config: Config) -> Iterator[str]:
    """Yield what is wrong with the files that the configuration names, by their keys."""
    if config.ca:
        try:
            Authority(config.state_dir, path=config.ca)
        except InfranetesError as error:
            yield f"ca: {str(error).removeprefix('ca: ')}"
    if config.kubernetes.kubeconfig:
        try:
            thd_read(Path(config.kubernetes.kubeconfig), config.kubernetes.master_ip)
        except InfranetesError as error:
            yield f"kubernetes.kubeconfig: {error}"
