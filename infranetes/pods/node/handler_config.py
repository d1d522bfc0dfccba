# SPDX-License-Identifier: Apache-2.0
"""The tables `[handlers.NAME]` of the configuration: settings for the pods of a RuntimeClass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import attrs
from attrs.validators import ge, in_

from infranetes.machines.pool_config import PoolConfig
from infranetes.providers import machine_annotations
from infranetes.providers.annotation_rows import MAX_VALUE
from infranetes.providers.annotations import (
    CONTAINER_PROVIDERS,
    CONTAINERS,
    NETWORK,
    NETWORKS,
    PREFIX,
    TABLE,
    TENANT,
    read,
)
from infranetes.providers.interface import Size
from infranetes.providers.virtlet import is_virtlets
from infranetes_common.config import Bytes
from infranetes_common.errors import InvalidArgument

DOCKER, SYSTEMD, MACHINE = "docker", "systemd", "machine"
KINDS = (DOCKER, SYSTEMD, MACHINE)
"""The kinds of pods, by their images: container images, executables, and images that are the VM."""

IMAGE_PROVIDERS = (DOCKER, SYSTEMD)
"""The kinds whose images the node has, not a cloud."""

CNI = "cni"  # the network of the node's own runtime
ALL = "*"
_NAME = re.compile("[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
NAME_WORDS = "a RuntimeClass's handler has up to 63 of a-z, 0-9 and -, and no - at either end"
# The annotations that a handler sets by keys of its own.
_BY_KEYS = {
    PREFIX + CONTAINERS: "contprovider",
    PREFIX + NETWORK.name: "network",
    PREFIX + TENANT.name: "tenant",
}
# Annotations that don't concern how a VM is made, which a handler can't set.
_NOT_SET = {
    name
    for row in TABLE
    if row.name in ("service-proxy", "shared-paths")
    for name in (PREFIX + row.name, *row.aliases)
}
_OF_MACHINES = {PREFIX + row.name: row for row in machine_annotations.TABLE}


@attrs.frozen
class AnnotationsConfig:
    """The annotations of Infranetes that a handler sets for its pods' VMs, and those that pods may set."""

    set: Mapping[str, str] = attrs.field(factory=dict)
    allow: tuple[str, ...] = (ALL,)  # names, or prefixes followed by a *


@attrs.frozen
class HandlerConfig:
    """The settings for pods of a RuntimeClass with this handler. Empty or 0: the node's own."""

    provider: str = ""  # of their VMs
    tenant: str = ""  # of the provider
    images: str = attrs.field(default="", validator=in_(("", *KINDS)))  # the kind of pod
    contprovider: str = attrs.field(default="", validator=in_(("", *CONTAINER_PROVIDERS)))
    network: str = attrs.field(default="", validator=in_(("", *NETWORKS, CNI)))
    # The VM's size if the pod asks for none.
    cpu_millis: int = attrs.field(default=0, validator=ge(0))
    memory: Bytes = attrs.field(default=Bytes(0), validator=ge(Bytes(0)))
    annotations: AnnotationsConfig = AnnotationsConfig()
    pool: PoolConfig = attrs.field(factory=PoolConfig)  # of VMs that only these pods may have

    @property
    def size(self) -> Size:
        """The size of a VM whose pod asks for nothing."""
        return Size(cpu_millis=self.cpu_millis, memory_bytes=int(self.memory))


def name_faults(names: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong with the names of handlers without settings, as `handler_faults` does."""
    for name in names:
        if not _NAME.fullmatch(name):
            yield f"runtime_handlers: {name[:64]!r}: {NAME_WORDS}"


def handler_faults(handlers: Mapping[str, HandlerConfig], kind: str) -> Iterator[str]:
    """Yield what is wrong with each handler on its own: the dotted key, a colon, and the reason.

    :param kind: of the pods whose handler names none."""
    for name, handler in handlers.items():
        if not _NAME.fullmatch(name):
            yield f"handlers.{name[:64]}: {NAME_WORDS}" if name else f"handlers: '': {NAME_WORDS}"
        for fault in _faults(handler, handler.images or kind, kind):
            yield f"handlers.{name}.{fault}"


def _faults(handler: HandlerConfig, kind: str, nodes: str) -> Iterator[str]:
    """Yield what is wrong with one handler: the key below its table, a colon, and the reason."""
    if len(handler.provider) > 63 or not handler.provider.isprintable():
        yield "provider: up to 63 printable characters are a provider's name"
    if handler.contprovider and kind != DOCKER:
        yield (
            f"contprovider: with images = {kind!r} (or such an imgprovider) nothing runs containers in VMs; "
            "leave it out"
        )
    if kind == DOCKER and nodes == SYSTEMD and not handler.contprovider:
        yield (
            'contprovider: with imgprovider = "systemd" VMs run executables unless told otherwise; say what '
            f"runs this handler's containers: {' or '.join(CONTAINER_PROVIDERS)}"
        )
    if kind == MACHINE and handler.pool.sizes:
        yield (
            "pool.sizes: each pod's image is its VM, so no VM can be booted before the pod is known; "
            "leave the pool out"
        )
    if handler.network == CNI and (handler.pool.sizes or kind == MACHINE):
        yield "network: VMs of a pool, and of machine images, are not made in a CNI's network"
    for pattern in handler.annotations.allow:
        if ALL in pattern[:-1] or not pattern:
            yield f"annotations.allow: {pattern[:80]!r}: expected a name, or the beginning of one and *"
    for name, value in handler.annotations.set.items():
        if fault := _set_fault(name, value, kind):
            yield f"annotations.set.{name}: {fault}"


def _set_fault(name: str, value: str, kind: str) -> str:
    """Return why a handler of pods of this kind may not set this annotation; "": it may."""
    if name in _OF_MACHINES and kind != MACHINE:
        return f'{name} is for pods of images = "machine"'
    if is_virtlets(name):
        return f"{name[:80]} is for pods; here say {PREFIX}…, which it becomes"
    if name in _BY_KEYS:
        return f"{name} is set by this table's key {_BY_KEYS[name]}"
    most = _OF_MACHINES[name].most if name in _OF_MACHINES else MAX_VALUE
    if name in _NOT_SET or len(value) > most:
        return f"{name[:80]} can't be set: it is the pod's own"
    try:
        read({name: value})
    except InvalidArgument as error:
        return str(error)
    return ""
