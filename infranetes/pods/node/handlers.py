# SPDX-License-Identifier: Apache-2.0
"""Runtime handlers: the settings that the pods of a RuntimeClass share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs

from infranetes.images import Image
from infranetes.pods.node.handler_config import ALL, CNI, DOCKER, MACHINE, SYSTEMD
from infranetes.pods.node.node_providers import NodeProvider, Providers
from infranetes.pods.node.pools import Pools
from infranetes.providers import machine_annotations
from infranetes.providers.annotations import network
from infranetes.providers.annotations import read as read_annotations
from infranetes.providers.hypervisor import IBootsGuests, IBootsImages
from infranetes.providers.interface import Size
from infranetes.providers.tenants import Tenants, node_provider_name, split
from infranetes.providers.virtlet import translated
from infranetes_common.errors import InvalidArgument

if TYPE_CHECKING:
    from infranetes.machines.pool import Pool
    from infranetes.pods.store.records import SandboxRecord

# The annotations on which a provider or this node acts. All others belong to the pod and the cluster.
_OURS = re.compile(r"infranetes\.[^/]*|(?:[^/]*\.)?infranetes\.io/.*")

_WORDS = {DOCKER: "containers", SYSTEMD: "executables", MACHINE: "machine images"}


@attrs.frozen
class AnnotationRule:
    """The annotations of Infranetes that a handler sets, and those that its pods may have.

    The annotations that it sets apply to the VM: the sandbox keeps the annotations that its client gave.

    :ivar handler: the handler's name, for messages. :ivar set: annotations by name.
    :ivar allow: the allowed names; one that ends in `*` allows every name with that prefix.
    """

    handler: str = ""
    set: Mapping[str, str] = attrs.field(factory=dict)
    allow: tuple[str, ...] = (ALL,)

    def check(self, annotations: Mapping[str, str]) -> None:
        """Check a pod's annotations. :raise InvalidArgument: one is not allowed; the message names it."""
        for name, value in annotations.items():
            if not _OURS.fullmatch(name):
                continue
            if self.set.get(name, value) != value:
                raise InvalidArgument(
                    f"annotation {name[:80]}: handlers.{self.handler}.annotations.set has another value for "
                    "the pods of this RuntimeClass; leave it out"
                )
            if name not in self.set and not any(_matches(name, pattern) for pattern in self.allow):
                raise InvalidArgument(
                    f"annotation {name[:80]} is not allowed by handlers.{self.handler}.annotations.allow for "
                    "the pods of this RuntimeClass; leave it out, or choose another one"
                )

    def applied(self, annotations: Mapping[str, str]) -> dict[str, str]:
        """Return the annotations of the pod's VM: the pod's, overridden by those that the handler sets."""
        return {**annotations, **self.set}


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith(ALL) else name == pattern


@attrs.frozen
class Handler:
    """A runtime handler and its settings.

    :ivar kind: the kind of its pods, one of KINDS. :ivar contprovider: the ContainerProvider of pods that
        choose none; "": the node's for this kind. :ivar network: one of NETWORKS; "": the node's.
    :ivar size: the size of a VM whose pod asks for none.
    :ivar pool: VMs that only its pods may have.
    :ivar tenant: the tenant of its pods; "": each pod's namespace or annotation tells, if it is of any.
    """

    name: str
    node_provider: NodeProvider
    kind: str = DOCKER
    contprovider: str = ""
    network: str = ""
    size: Size = attrs.field(factory=Size)
    annotations: AnnotationRule = AnnotationRule()
    pool: Pool | None = None
    tenant: str = ""

    @property
    def provider(self) -> str:
        """The name of the provider, of which `node_provider` may be a tenant."""
        return split(self.node_provider.name)[0]

    def sized(self, size: Size) -> Size:
        """Return the size of the VM of a pod that asks for this size: what it leaves out is the handler's."""
        return attrs.evolve(
            size,
            cpu_millis=size.cpu_millis or self.size.cpu_millis,
            memory_bytes=size.memory_bytes or self.size.memory_bytes,
        )

    def check_annotations(self, annotations: Mapping[str, str]) -> None:
        """Check a pod's annotations. :raise InvalidArgument: one is not allowed, or is for pods of another
        kind; the message names it."""
        if self.kind != MACHINE:
            machine_annotations.refuse(annotations)
            self.annotations.check(annotations)
            return
        annotations = translated(annotations)
        read_annotations(annotations)
        self.annotations.check(annotations)
        if not IBootsImages.providedBy(self.node_provider.provider):
            machine_annotations.refuse_for_cloud(
                self.annotations.applied(annotations),
                self.node_provider.name,
                guests=IBootsGuests.providedBy(self.node_provider.provider),
            )

    def vm_annotations(self, annotations: Mapping[str, str]) -> dict[str, str]:
        """Return the annotations of a pod's VM: the pod's, overridden by those that the handler sets."""
        return self.annotations.applied(translated(annotations) if self.kind == MACHINE else annotations)

    def network_of(self, annotations: Mapping[str, str], default: str) -> str:
        """Return the network of a pod's address, as recorded: CNI, one of NETWORKS, or "" without a choice.

        :param default: the network, where there is an overlay, of pods that choose none."""
        if self.network == CNI:
            return CNI
        chosen = network(annotations) or self.network
        return chosen or (default if self.node_provider.overlay is not None else "")

    def recorded(self, record: SandboxRecord, node_provider: NodeProvider) -> Handler:
        """Return this handler as it was when the sandbox was made: a changed configuration changes no pod."""
        kind = record.kind
        if node_provider is self.node_provider and kind == self.kind:
            return self
        contprovider = self.contprovider if kind == self.kind else SYSTEMD if kind == SYSTEMD else ""
        return attrs.evolve(
            self, node_provider=node_provider, kind=kind, contprovider=contprovider, pool=None
        )


class Handlers:
    """The runtime handlers of the node.

    :ivar by_name: the handlers; "": the node's own.
    :ivar contprovider: the ContainerProvider of pods that choose none and whose handler has none; "": the
        first one of the VMs' image.
    :ivar network: where there is an overlay, the network (one of NETWORKS) of pods that choose none.
    :ivar tenants: those of each provider, by its name.
    :ivar image_source: where pods are of several kinds, returns the source of an image: the name of its kind
        or, for a machine image, of its provider; None: all pods are of one kind."""

    def __init__(
        self,
        by_name: Mapping[str, Handler],
        providers: Providers,
        pools: Pools,
        contprovider: str = "",
        network: str = "vpc",
        tenants: Mapping[str, Tenants] = {},
        image_source: Callable[[str], str] | None = None,
    ) -> None:
        self.by_name = dict(by_name)
        self.contprovider = contprovider
        self.network = network
        self.tenants = tenants
        self.image_source = image_source
        self._providers = providers
        self._pools = pools

    def named(self, name: str) -> Handler:
        """Return the runtime handler of this name, or the node's own if it is no longer configured."""
        return self.by_name.get(name) or self.by_name[""]

    def chosen(self, name: str, namespace: str, annotations: Mapping[str, str]) -> Handler:
        """Return the runtime handler of this name as it is for a new pod: that of the pod's tenant.

        :raise InvalidArgument: the pod may not be of the tenant that it would be of."""
        handler = self.named(name)
        tenants = self.tenants.get(handler.provider) or Tenants(handler.provider)
        name = node_provider_name(handler.provider, tenants.choose(namespace, handler.tenant, annotations))
        if name == handler.node_provider.name:
            return handler
        return attrs.evolve(handler, node_provider=self._providers.by_name[name], pool=None)

    def of(self, record: SandboxRecord) -> Handler:
        """Return the sandbox's handler as it was when the sandbox was made."""
        return self.named(record.runtime_handler).recorded(record, self._providers.of(record))

    def pool_for(self, handler: Handler) -> Pool | None:
        """Return the pool that may serve the handler's pods, or None.

        It is the handler's own, or the node's if its VMs are made the same way."""
        own = self.by_name[""]
        like_own = (
            handler.node_provider is own.node_provider
            and handler.kind == own.kind
            and not handler.annotations.set
        )
        return handler.pool or (self._pools.own if like_own and handler.network != CNI else None)

    def check_image(self, record: SandboxRecord, image: Image) -> None:
        """Check that a container of the sandbox can have this image.

        :raise InvalidArgument: the image is for pods of another kind; the message says what to do."""
        handler = self.of(record)
        if self.image_source is None:
            return
        source = self.image_source(image.id)
        fitting = {handler.provider} if handler.kind == MACHINE else {handler.kind}
        if handler.kind == MACHINE and IBootsImages.providedBy(handler.node_provider.provider):
            fitting.add(DOCKER)  # images of registries may hold a machine's disk
        if source not in fitting:
            where = f" of provider {handler.provider}" if handler.kind == MACHINE else ""
            raise InvalidArgument(
                f"image {image.id} is one of {source}, and pods of handler {handler.name!r} "
                f"are made of {_WORDS[handler.kind]}{where}: name another image, or another RuntimeClass"
            )
