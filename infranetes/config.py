"""The configuration of the node daemon: one TOML file, which flags override."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network, ip_address, ip_network
from pathlib import Path
from typing import Any

import attrs
from attrs.validators import ge, gt, in_, instance_of

from infranetes.control import SOCKET as CONTROL_SOCKET
from infranetes.images.config import ImagesConfig
from infranetes.pods.poolconfig import PoolConfig
from infranetes.volumes.config import VolumesConfig
from infranetes_common import config
from infranetes_common.errors import ConfigError

BASE_IP = "base_ip"  # a flag that is a key of the provider's
ADDRESSING = ("qemu", "simulated")  # providers with a pod_cidr
IMAGE_PROVIDERS = ("docker", "systemd")
MAX_SOCKET_PATH = 107  # bytes: sun_path of unix(7), with its ending zero
LEVELS = ("debug", "info", "warn", "error")
FORMATS = ("text", "json")
_HOST = re.compile(r"([0-9A-Za-z.-]{1,253}|\[[0-9A-Fa-f:.]+\])?")


@attrs.frozen
class LogConfig:
    """What the daemon says of itself."""

    format: str = attrs.field(default="text", validator=in_(FORMATS))
    level: str = attrs.field(default="info", validator=in_(LEVELS))


@attrs.frozen
class TimesConfig:
    """How long things may take. Seconds."""

    launch: float = attrs.field(default=600.0, validator=gt(0))  # until a sandbox is ready
    desertion: float = attrs.field(default=600.0, validator=gt(0))  # how long an unclaimed launch is kept
    # When a lost agent's containers are UNKNOWN. kubelet kills what is, so a restart of an agent has to fit.
    unknown_after: float = attrs.field(default=5.0, validator=ge(0))
    listing: float = attrs.field(default=0.25, validator=ge(0))  # what a list gives agents just lost
    log_drain: float = attrs.field(default=15.0, validator=ge(0))  # for the rest of an ended container's log
    sweep: float = attrs.field(default=60.0, validator=gt(0))  # between passes over the provider's VMs
    certificate: float = attrs.field(default=86400.0, validator=ge(2))  # how long a VM's certificate is good
    shutdown: float = attrs.field(default=5.0, validator=ge(0))  # for calls that run when the daemon ends


@attrs.frozen
class StreamingConfig:
    """Where exec, attach and port-forward are served."""

    host: str = "127.0.0.1"  # an IPv4 address of the node
    port: int = 0  # 0: any that is free
    advertise: str = ""  # the host in the URLs that kubelet is given; empty: host


def _is_ip(instance: Any, attribute: Any, value: str) -> None:
    if value:
        ip_address(value)


def _is_subnet(instance: Any, attribute: Any, value: str) -> None:
    if value:
        ip_network(value)


@attrs.frozen
class KubernetesConfig:
    """The cluster that this node is in. Kept for what watches Kubernetes; empty: not given."""

    master_ip: str = attrs.field(default="", validator=_is_ip)  # the API server's address
    cluster_cidr: str = attrs.field(default="", validator=_is_subnet)  # of the pods of all nodes
    kubeconfig: str = ""  # a file


def _default_node() -> str:
    return socket.gethostname() or "localhost"


@attrs.frozen
class Config:
    """The whole file. Every key has a default."""

    socket: str = "/run/infranetes/infranetes.sock"  # a path, or unix://PATH
    state_dir: Path = Path("/var/lib/infranetes")  # kept over reboots
    run_dir: Path = Path("/run/infranetes")  # gone after a reboot
    # Which of the IaaS's machines are this node's. Changing either disowns those that run.
    cluster: str = "default"
    node: str = attrs.field(factory=_default_node)
    provider: str = "qemu"
    # Whose images pods are made of: docker: container images out of registries; systemd: executables by URL;
    # the provider's name: its own machine images, where it is a cloud.
    imgprovider: str = "docker"
    # A file with the CA that signs the VMs' certificates: PEM, certificate and key. Empty: one of our own.
    ca: str = ""
    # Each provider's own table, by its name.
    providers: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    # Names that RunPodSandbox may give beside the empty one; all mean the same.
    runtime_handlers: tuple[str, ...] = ("infranetes",)
    # Files that define the AppArmor profiles which containers may ask for.
    apparmor_dir: Path = Path("/etc/apparmor.d")
    # What kubelet is told to use for its own control groups.
    cgroup_driver: str = attrs.field(default="systemd", validator=in_(("systemd", "cgroupfs")))
    parallel_agents: int = attrs.field(default=64, validator=instance_of(int))  # connected to at once
    images: ImagesConfig = attrs.field(factory=ImagesConfig)
    volumes: VolumesConfig = attrs.field(factory=VolumesConfig)
    kubernetes: KubernetesConfig = attrs.field(factory=KubernetesConfig)
    log: LogConfig = LogConfig()
    times: TimesConfig = TimesConfig()
    pool: PoolConfig = attrs.field(factory=PoolConfig)
    streaming: StreamingConfig = StreamingConfig()

    @property
    def socket_path(self) -> str:
        """The socket without its scheme."""
        return self.socket.removeprefix("unix://")


def load(path: str | None, flags: Mapping[str, Any]) -> Config:
    """The configuration of the file at `path` (None: all defaults), with `flags` (dotted keys) over it.

    :raise ConfigError: names the file or flag, and the key."""
    found = config.load(path, Config) if path else Config()
    origin = path or "command line"
    for key, value in flags.items():
        if key == BASE_IP:
            continue  # once it is known whose subnet it is
        table, _, name = key.rpartition(".")
        try:
            if table:
                inner = attrs.evolve(getattr(found, table), **{name: value})
                found = attrs.evolve(found, **{table: inner})
            else:
                found = attrs.evolve(found, **{name: value})
        except ValueError as error:
            raise ConfigError(f"command line: {key}: {error.args[0]}") from None
    if BASE_IP in flags:
        found = with_base_ip(found, str(flags[BASE_IP]))
    _check(found, origin)
    return found


def with_base_ip(found: Config, base: str) -> Config:
    """`found` with the pods' subnet of its provider given by its first three numbers.

    :raise ConfigError: they are none, or the provider gives no addresses."""
    if found.provider not in ADDRESSING:
        raise ConfigError(
            f"command line: base-ip: provider {found.provider!r} takes pods' addresses from elsewhere; "
            f"it is for {' and '.join(ADDRESSING)}"
        )
    try:
        subnet = IPv4Network(f"{base.removesuffix('.')}.0/24")
    except ValueError:
        raise ConfigError(
            f"command line: base-ip: {base!r} is not the first three numbers of an address, such as 10.88.3"
        ) from None
    table = {**found.providers.get(found.provider, {}), "pod_cidr": str(subnet)}
    return attrs.evolve(found, providers={**found.providers, found.provider: table})


def _check(found: Config, origin: str) -> None:
    path = found.socket_path
    if not path.startswith("/"):
        raise ConfigError(f"{origin}: socket: {found.socket!r} is not an absolute path or unix:///PATH")
    if len(path.encode()) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{origin}: socket: {path!r} is over {MAX_SOCKET_PATH} bytes, too long for a socket"
        )
    for key in ("state_dir", "run_dir"):
        if not getattr(found, key).is_absolute():
            raise ConfigError(f"{origin}: {key}: {str(getattr(found, key))!r} is not an absolute path")
    if len(os.fsencode(found.run_dir / CONTROL_SOCKET)) > MAX_SOCKET_PATH:
        raise ConfigError(f"{origin}: run_dir: {str(found.run_dir)!r} is too long for a socket in it")
    for key in ("cluster", "node", "provider"):
        value = getattr(found, key)
        if not value or len(value) > 63 or not value.isprintable():
            raise ConfigError(f"{origin}: {key}: 1 to 63 characters are needed")
    if found.imgprovider not in (*IMAGE_PROVIDERS, found.provider):
        raise ConfigError(
            f"{origin}: imgprovider: {found.imgprovider!r} is not offered; known are "
            f"{', '.join(IMAGE_PROVIDERS)}, and the name of the provider where that is a cloud"
        )
    if found.ca and not os.path.isabs(found.ca):
        raise ConfigError(f"{origin}: ca: {found.ca!r} is not an absolute path")
    if found.parallel_agents < 1:
        raise ConfigError(f"{origin}: parallel_agents: at least 1 is needed")
    _check_streaming(found.streaming, origin)


def _check_streaming(found: StreamingConfig, origin: str) -> None:
    try:
        address = IPv4Address(found.host)
    except ValueError:
        raise ConfigError(f"{origin}: streaming.host: {found.host!r} is not an IPv4 address") from None
    if not 0 <= found.port < 65536:
        raise ConfigError(f"{origin}: streaming.port: {found.port} is not 0 to 65535")
    if address.is_unspecified and not found.advertise:
        raise ConfigError(
            f"{origin}: streaming.advertise: with the host {address} it has to say by which name or address "
            "kubelet reaches this node"
        )
    if not _HOST.fullmatch(found.advertise):
        raise ConfigError(f"{origin}: streaming.advertise: {found.advertise!r} is not a host name or address")
