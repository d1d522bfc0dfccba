# SPDX-License-Identifier: Apache-2.0
"""The keys of infranetes.toml, and their defaults."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import attrs
from attrs import Attribute
from attrs.validators import ge, gt, in_, instance_of

from infranetes.attestation.config import AttestationConfig
from infranetes.csi.config import CsiConfig
from infranetes.delegate.config import DelegateConfig
from infranetes.images.config import ImagesConfig
from infranetes.images.machine import config as machine_images
from infranetes.images.machine.config import MachineImageConfig
from infranetes.machines.pool_config import PoolConfig
from infranetes.monitoring.config import MetricsConfig
from infranetes.overlay.config import OverlayConfig
from infranetes.pods.keeping.config import KeptConfig
from infranetes.pods.node.handler_config import IMAGE_PROVIDERS, MACHINE, HandlerConfig
from infranetes.providers import tenants
from infranetes.providers.annotations import CONTAINER_PROVIDERS, NETWORKS
from infranetes.streaming.config import StreamingConfig
from infranetes.tracing.config import TracingConfig
from infranetes.volumes.config import VolumesConfig
from infranetes_common import config
from infranetes_common import config_outside as outside
from infranetes_common.addresses import parse_address, parse_network

CONTROL_SOCKET = "control.sock"  # in the run directory
ADDRESSING = ("qemu", "simulated")  # providers with a pod_cidr
LEVELS = ("debug", "info", "warn", "error")
FORMATS = ("text", "json")


@attrs.frozen
class LogConfig:
    """The daemon's log."""

    format: str = attrs.field(default="text", validator=in_(FORMATS))
    level: str = attrs.field(default="info", validator=in_(LEVELS))


@attrs.frozen
class TimesConfig:
    """How long things may take. Seconds."""

    launch: float = attrs.field(default=600.0, validator=gt(0))  # until a sandbox is ready
    desertion: float = attrs.field(default=600.0, validator=gt(0))  # a launch that no call waits for
    # When a lost agent's containers become UNKNOWN. kubelet kills such containers, so this is as long as
    # Kubernetes waits for a node before it recreates its pods elsewhere.
    unknown_after: float = attrs.field(default=300.0, validator=ge(0))
    listing: float = attrs.field(default=0.25, validator=ge(0))  # how long a list waits for lost agents
    log_drain: float = attrs.field(default=15.0, validator=ge(0))  # for the rest of an ended container's log
    sweep: float = attrs.field(default=60.0, validator=gt(0))  # between passes over the provider's VMs
    unused_images: float = attrs.field(default=60.0, validator=gt(0))  # kept in a VM that takes layers
    certificate: float = attrs.field(default=86400.0, validator=ge(2))  # how long a VM's certificate is valid
    shutdown: float = attrs.field(default=5.0, validator=ge(0))  # for calls that run when the daemon stops


def _is_ip(instance: object, attribute: Attribute[str], value: str) -> None:
    if value:
        parse_address(value)


def _are_subnets(instance: object, attribute: Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    for each in value:
        try:
            parse_network(each)
        except ValueError as error:
            raise ValueError(f"{each[:80]!r} is no subnet such as 10.244.0.0/16: {error}") from None


@attrs.frozen
class KubernetesConfig:
    """The cluster that this node is in, for watching Kubernetes. Empty: not given."""

    master_ip: str = attrs.field(default="", validator=_is_ip)  # the API server's address
    # The subnets of all nodes' pods and of Services. Whatever is in them sees pods' own addresses.
    cluster_cidrs: tuple[str, ...] = attrs.field(default=(), validator=_are_subnets)
    # A file; with one, pods' VMs know the addresses of Services.
    kubeconfig: str = ""
    # The network of pods that don't choose one, if their VMs are in a cloud.
    network: str = attrs.field(default="vpc", validator=in_(NETWORKS))
    service_proxy: bool = True  # false: VMs don't, since kube-proxy on the node serves all pods
    network_policies: bool = False  # true: they are enforced, and pods are closed until they are known

    def look_outside(self, is_set: Callable[[str], bool]) -> Iterator[outside.Finding]:
        """Read the kubeconfig, without a question to the API server."""
        if self.kubeconfig:
            # Imported late: other commands than `config check` start faster without it.
            from infranetes.kubernetes.look import look

            for said in look(Path(self.kubeconfig), self.master_ip):
                yield attrs.evolve(said, key="kubeconfig")

    @property
    def networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The subnets in `cluster_cidrs`."""
        return tuple(parse_network(each) for each in self.cluster_cidrs)


def _authority(path: str) -> Iterator[outside.Finding]:
    from infranetes.identity.authority import Authority  # imported late, as above

    return outside.tried(lambda: Authority("/nonexistent", path=path), "ca")


def _default_node() -> str:
    return socket.gethostname() or "localhost"


@attrs.frozen
class ControlConfig:
    """What infranetes-ctl may do besides asking and cleaning up."""

    enter: bool = False  # open shells in pods' VMs, and use their screens and keyboards


def _provider_tables() -> dict[str, type[attrs.AttrsInstance] | None]:
    from infranetes.providers import registry  # imported late: it is needed only for a wrong key

    return {name: registry.settings_class(name) for name in registry.names()}


@attrs.frozen
class Config:
    """The whole file. Every key has a default."""

    # A path, or unix://PATH.
    socket: str = attrs.field(
        default="/run/infranetes/infranetes.sock", metadata=outside.names(outside.own_socket)
    )
    # The one is kept over reboots, the other is gone after one.
    state_dir: Path = attrs.field(
        default=Path("/var/lib/infranetes"), metadata=outside.names(outside.directory)
    )
    run_dir: Path = attrs.field(default=Path("/run/infranetes"), metadata=outside.names(outside.directory))
    # These mark the VMs of this node in the IaaS. If one is changed, running VMs are no longer this node's.
    cluster: str = "default"
    node: str = attrs.field(factory=_default_node)
    provider: str = "qemu"
    # The images of pods. docker: container images from registries; systemd: executables by URL; the name of
    # the provider, if that is a cloud: its machine images.
    imgprovider: str = "docker"
    # The ContainerProvider of pods that don't choose one. Empty: the first one of their guest image.
    contprovider: str = attrs.field(default="", validator=in_(("", *CONTAINER_PROVIDERS)))
    # Addresses or subnets, besides the node's own, that its connections have when they get to VMs.
    node_addresses: tuple[str, ...] = attrs.field(default=(), validator=_are_subnets)
    # A file with the CA that signs the VMs' certificates: PEM, certificate and key. Empty: the node's own.
    ca: str = attrs.field(default="", metadata=outside.names(lambda path: _authority(path)))
    # Each provider's own table, by its name.
    providers: Mapping[str, Mapping[str, object]] = attrs.field(
        factory=dict, metadata={config.HOLDS: _provider_tables}
    )
    # The runtime handlers, besides the empty one, whose pods have no settings of their own.
    runtime_handlers: tuple[str, ...] = ("infranetes",)
    # Further runtime handlers, with the settings of their pods.
    handlers: Mapping[str, HandlerConfig] = attrs.field(factory=dict)
    # The directory of the AppArmor profiles that containers may use.
    apparmor_dir: Path = attrs.field(
        default=Path("/etc/apparmor.d"), metadata=outside.names(outside.present_directory)
    )
    # The cgroup driver that kubelet is told to use.
    cgroup_driver: str = attrs.field(default="systemd", validator=in_(("systemd", "cgroupfs")))
    parallel_agents: int = attrs.field(default=64, validator=instance_of(int))  # connected to at one time
    # The node's own catalogue of machines' images, by NAME:VERSION.
    machine_images: Mapping[str, MachineImageConfig] = attrs.field(
        factory=dict, metadata=outside.names(lambda images: machine_images.look(images))
    )
    images: ImagesConfig = attrs.field(factory=ImagesConfig)
    kept: KeptConfig = attrs.field(factory=KeptConfig)
    volumes: VolumesConfig = attrs.field(factory=VolumesConfig)
    kubernetes: KubernetesConfig = attrs.field(factory=KubernetesConfig)
    overlay: OverlayConfig = attrs.field(factory=OverlayConfig)
    log: LogConfig = LogConfig()
    times: TimesConfig = TimesConfig()
    pool: PoolConfig = attrs.field(factory=PoolConfig)
    streaming: StreamingConfig = attrs.field(factory=StreamingConfig)
    control: ControlConfig = ControlConfig()
    delegate: DelegateConfig = attrs.field(factory=DelegateConfig)
    csi: CsiConfig = attrs.field(factory=CsiConfig)
    metrics: MetricsConfig = attrs.field(factory=MetricsConfig)
    tracing: TracingConfig = attrs.field(factory=TracingConfig)
    attestation: AttestationConfig = attrs.field(factory=AttestationConfig)

    @property
    def offered_handlers(self) -> tuple[str, ...]:
        """The names of all runtime handlers but the empty one."""
        return tuple(dict.fromkeys((*self.runtime_handlers, *self.handlers)))

    @property
    def kind(self) -> str:
        """The kind of pods whose handler names none."""
        return self.imgprovider if self.imgprovider in IMAGE_PROVIDERS else MACHINE

    def provider_of(self, handler: str) -> str:
        """The name of the provider of a handler's VMs."""
        return (self.handlers[handler].provider if handler in self.handlers else "") or self.provider

    def kind_of(self, handler: str) -> str:
        """The kind of a handler's pods."""
        return (self.handlers[handler].images if handler in self.handlers else "") or self.kind

    def node_provider_of(self, handler: str) -> str:
        """The name of what makes a handler's VMs: its provider, or a tenant of that."""
        tenant = self.handlers[handler].tenant if handler in self.handlers else ""
        return tenants.node_provider_name(self.provider_of(handler), tenant)

    @property
    def offered_node_providers(self) -> tuple[str, ...]:
        """The names of all providers that make VMs, the node's own first, and of their tenants."""
        every = self.offered_providers
        its = [(each, tenants.tables(self.providers.get(each, {}))) for each in every]
        return (
            *every,
            *(tenants.node_provider_name(each, tenant) for each, found in its for tenant in found),
        )

    @property
    def has_tenants(self) -> bool:
        """Whether a provider that makes VMs has tenants."""
        return self.offered_node_providers != self.offered_providers

    @property
    def offered_providers(self) -> tuple[str, ...]:
        """The names of all providers that make VMs, the node's own first."""
        return tuple(dict.fromkeys((self.provider, *map(self.provider_of, self.handlers))))

    @property
    def socket_path(self) -> str:
        """The CRI socket's path."""
        return self.socket.removeprefix("unix://")

    @property
    def control_socket(self) -> str:
        """The path of the socket for infranetes-ctl."""
        return str(self.run_dir / CONTROL_SOCKET)
