# SPDX-License-Identifier: Apache-2.0
"""Checks of the daemon's configuration as a whole, in addition to the checks of each key.

A fault reads as the dotted key, a colon, and an explanation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from infranetes.config.schema import Config
from infranetes.images.machine.config import machine_faults
from infranetes.monitoring.config import metrics_faults
from infranetes.pods.node.handler_config import CNI, DOCKER, IMAGE_PROVIDERS, handler_faults, name_faults
from infranetes.streaming.config import streaming_faults

MAX_SOCKET_PATH = 107  # bytes: sun_path of unix(7), with its ending zero
_OF_CRIO = "crio.sock"


def faults(config: Config) -> Iterator[str]:
    """Yield everything that is wrong."""
    yield from _of_paths(config)
    for key in ("cluster", "node", "provider"):
        value = getattr(config, key)
        if not value or len(value) > 63 or not value.isprintable():
            yield f"{key}: 1 to 63 printable characters are needed"
    yield from _of_images(config)
    yield from machine_faults(config.machine_images)
    yield from name_faults(config.runtime_handlers)
    yield from handler_faults(config.handlers, config.kind)
    for name, handler in config.handlers.items():
        if handler.network == CNI:
            yield from _of_cni(config, name)
        if handler.tenant and config.node_provider_of(name) not in config.offered_node_providers:
            provider = config.provider_of(name)
            yield f"handlers.{name}.tenant: there is no table providers.{provider}.tenants.{handler.tenant}"
    if config.kubernetes.network_policies and not config.kubernetes.kubeconfig:
        yield ("kubernetes.network_policies: they are read from the API server: set kubernetes.kubeconfig")
    if config.metrics.kubectl_audience and not config.kubernetes.kubeconfig:
        yield ("metrics.kubectl_audience: the API server says what users may see: set kubernetes.kubeconfig")
    if config.parallel_agents < 1:
        yield "parallel_agents: at least 1 is needed"
    yield from streaming_faults(config.streaming)
    yield from _of_delegate(config)
    yield from metrics_faults(config.metrics)


def _of_paths(config: Config) -> Iterator[str]:
    path = config.socket_path
    if not path.startswith("/"):
        yield f"socket: {config.socket!r} is not an absolute path or unix:///PATH"
    if len(path.encode()) > MAX_SOCKET_PATH:
        yield f"socket: {path!r} is over {MAX_SOCKET_PATH} bytes, too long for a socket"
    if path.endswith(_OF_CRIO):
        yield (
            f"socket: {path!r} ends in {_OF_CRIO}, by which kubelet knows CRI-O and "
            "takes no statistics from the runtime; choose another name"
        )
    for key in ("state_dir", "run_dir"):
        if not getattr(config, key).is_absolute():
            yield f"{key}: {str(getattr(config, key))!r} is not an absolute path"
    if len(os.fsencode(config.control_socket)) > MAX_SOCKET_PATH:
        yield f"run_dir: {str(config.run_dir)!r} is too long for a socket in it"
    if config.ca and not os.path.isabs(config.ca):
        yield f"ca: {config.ca!r} is not an absolute path"


def _of_images(config: Config) -> Iterator[str]:
    if config.imgprovider not in (*IMAGE_PROVIDERS, config.provider):
        yield (
            f"imgprovider: {config.imgprovider!r} is not offered; known are "
            f"{', '.join(IMAGE_PROVIDERS)}, and the name of the provider where that is a cloud"
        )
    if config.imgprovider not in IMAGE_PROVIDERS and config.pool.sizes:
        yield (
            f"pool.sizes: with imgprovider = {config.imgprovider!r} each pod's image is its VM, so no VM can "
            "be booted before the pod is known; leave the pool out"
        )
    if config.contprovider and config.kind != DOCKER:
        yield (
            f"contprovider: with imgprovider = {config.imgprovider!r} nothing "
            "runs containers in VMs; leave it out"
        )


def _of_cni(config: Config, name: str) -> Iterator[str]:
    where = f"handlers.{name}.network: the node's CNI"
    if not config.delegate.socket:
        yield f"{where} is asked through the node's own runtime: set delegate.socket"
    if config.provider_of(name) != "qemu":
        yield f"{where} can only give networks to VMs of the provider qemu, which run on the node"
    if config.kubernetes.network_policies:
        yield f"{where} enforces NetworkPolicies itself; leave kubernetes.network_policies out"


def _of_delegate(config: Config) -> Iterator[str]:
    socket, path = config.delegate.socket, config.delegate.socket_path
    if socket and not os.path.isabs(path):
        yield f"delegate.socket: {socket!r} is not an absolute path or unix:///PATH"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        yield f"delegate.socket: {path!r} is over {MAX_SOCKET_PATH} bytes, too long for a socket"
    if path and os.path.realpath(path) == os.path.realpath(config.socket_path):
        yield f"delegate.socket: {path!r} is this daemon's own (socket): name that of containerd or CRI-O"
