# SPDX-License-Identifier: Apache-2.0
"""The agent's configuration: a TOML file and its drop-ins, every key optional."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from infranetes_common import config as common
from infranetes_common import config_files
from infranetes_common.errors import ConfigError

VIRTIO_SERIAL = "virtio-serial"
FILE = "file"
CERTIFICATE = "certificate"
CLOUDS = ("aws", "azure", "gcp", "openstack", "vsphere", "cloud-init", "cloud")  # see identity.metadata
DEFAULT_CHANNEL = Path("/dev/virtio-ports/infranetes.identity")
DEFAULT_AGENT_DEVICE = "/dev/virtio-ports/infranetes.agent"
USER_DATA = Path("/var/lib/cloud/instance/user-data.txt")  # where cloud-init keeps it, mode 0600


@attrs.frozen
class IdentityConfig:
    """The table `identity`: where the machine's identity comes from, and what is done with it."""

    # virtio-serial, file, certificate, one of `CLOUDS`, or `cloud`: whichever cloud the machine is in
    source: str = VIRTIO_SERIAL
    # The virtio-serial channel's device, or the document's file; for cloud-init that is USER_DATA by default.
    path: Path = DEFAULT_CHANNEL
    # With the source `virtio-serial`: the device by which the node calls the agent. "", or none is there: the
    # agent listens at a TCP port, with TLS.
    agent_device: str = DEFAULT_AGENT_DEVICE
    cert: str = ""  # with the source `certificate`: the machine's and its CA's certificates, PEM
    key: str = ""  # with the source `certificate`: the private key
    # Whether to apply the identity to the machine (clock, entropy, names, network); if false, only the agent
    # uses it.
    apply: bool = True
    # Whether the machine's kernel keeps the agent's port for the node, where nothing else does.
    node_only: bool = True
    interface: str = ""  # the network card to configure; empty: the first one
    vmtoolsd: str = "vmtoolsd"  # open-vm-tools' program that reads vSphere's guestinfo
    endpoint: str = ""  # the cloud's metadata service, http://HOST:PORT; empty: the cloud's own


@attrs.frozen
class LimitsConfig:
    """The table `limits`: how much the agent serves at a time."""

    connections: int = 16  # authenticated connections at a time
    handshakes: int = 32  # connections not yet authenticated; one more ends one of whoever has most
    handshake_seconds: float = 10.0
    handshake_rate: float = 4.0  # new connections a second from one address
    execs: int = 64  # ExecSync commands at a time
    sessions: int = 64  # Exec and Attach sessions at a time
    forwards: int = 256  # PortForward connections at a time


@attrs.frozen
class Config:
    """The agent's whole configuration."""

    provider: str = "docker"  # the ContainerProvider: docker, oci, systemd, machine or a plug-in's name
    providers: Mapping[str, Mapping[str, object]] = attrs.field(factory=dict)
    choices: tuple[str, ...] = ()  # names of further ContainerProviders that a pod may choose
    choice_file: Path = Path("/var/lib/vmserver/provider")  # the name of the pod's choice, kept over reboots
    listen: str = ""  # HOST:PORT in place of the identity's; port 0: any free port
    run_dir: Path = Path("/run/vmserver")  # emptied by a reboot; holds the identity and the sandbox's files
    volumes_dir: Path = Path("/var/lib/vmserver/volumes")  # volumes that may be on a disk
    etc_dir: Path = Path("/etc")  # where hosts, resolv.conf, hostname and machine-id are written
    # Whether to take processors and room on the root disk into use that the hypervisor adds; for machines in
    # which no udevd does.
    hotplug: bool = False
    mount_namespace: str = ""  # the path at which the machine keeps the agent's own mount namespace
    log_file: str = ""  # the log's file, in place of standard output
    identity: IdentityConfig = IdentityConfig()
    limits: LimitsConfig = LimitsConfig()


def load(path: str | Path | None, overrides: Mapping[str, object] | None = None) -> Config:
    """Return the configuration, which `read` reads."""
    return read(path, overrides)[0]


def read(
    path: str | Path | None, overrides: Mapping[str, object] | None = None
) -> tuple[Config, config_files.Sources]:
    """Read the file `path` and its drop-ins; None: take the defaults. `overrides` are flags by dotted key.

    :raise ConfigError: unreadable, not TOML, an unknown key or a wrong value; names file and key.
    """
    nothing = config_files.Document({}, config_files.Sources("command line"))
    document = nothing if path is None else config_files.read(path)
    config = common.of_document(document, Config, overrides)
    try:
        return check(config, document.sources.main), document.sources
    except ConfigError as error:
        raise document.sources.placed(error) from None


def check(config: Config, origin: str) -> Config:
    """Return `config` if its values are valid together.

    :raise ConfigError: they are not; names `origin` and the key.
    """
    problems = [
        (
            config.identity.source not in (VIRTIO_SERIAL, FILE, CERTIFICATE, *CLOUDS),
            "identity.source",
            f"one of {', '.join((VIRTIO_SERIAL, FILE, CERTIFICATE, *CLOUDS))}",
        ),
        (
            not re.fullmatch(r"(?:http://[A-Za-z0-9.-]+(?::[0-9]{1,5})?)?", config.identity.endpoint),
            "identity.endpoint",
            "http://HOST:PORT",
        ),
        (
            config.identity.source == CERTIFICATE and not (config.identity.cert and config.identity.key),
            "identity.cert, identity.key",
            "both, where the identity is a certificate",
        ),
        (not config.provider, "provider", "the name of a ContainerProvider"),
        (
            len({config.provider, *config.choices}) <= len(config.choices) or "" in config.choices,
            "choices",
            "names of other ContainerProviders than `provider`, each once",
        ),
        (bool(config.log_file) and not config.log_file.startswith("/"), "log_file", "an absolute path"),
        (not config.choice_file.is_absolute(), "choice_file", "an absolute path"),
        (config.limits.connections < 1, "limits.connections", "1 or more"),
        (config.limits.handshakes < 1, "limits.handshakes", "1 or more"),
        (config.limits.handshake_seconds <= 0, "limits.handshake_seconds", "seconds above 0"),
        (config.limits.handshake_rate <= 0, "limits.handshake_rate", "connections a second above 0"),
        (config.limits.execs < 1, "limits.execs", "1 or more"),
        (config.limits.sessions < 1, "limits.sessions", "1 or more"),
        (config.limits.forwards < 1, "limits.forwards", "1 or more"),
        (bool(config.listen) and not _is_address(config.listen), "listen", "IPv4-ADDRESS:PORT"),
    ]
    for wrong, key, expected in problems:
        if wrong:
            raise ConfigError(f"{origin}: {key}: expected {expected}")
    return config


def _is_address(text: str) -> bool:
    try:
        split_address(text)
    except ValueError:
        return False
    return True


def split_address(text: str) -> tuple[str, int]:
    """Split HOST:PORT. :raise ValueError: it isn't that."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(text)
    return host, int(port)
