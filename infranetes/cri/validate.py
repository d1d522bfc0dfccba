# SPDX-License-Identifier: Apache-2.0
"""Validation of requests. Each check raises InvalidArgument, which names the field."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from infranetes.hostports import mappings
from infranetes.providers.annotations import read as read_annotations
from infranetes.providers.cgroup_parents import group_path
from infranetes.volumes import mounts
from infranetes_common import cpusets
from infranetes_common.errors import InvalidArgument
from infranetes_common.user_namespaces import user_namespace
from infranetes_common.wire import cri

MAX_NAME = 253
MAX_SANDBOX_CONFIG = 1024 * 1024  # bytes, serialized
MAX_CONTAINER_CONFIG = 4 * 1024 * 1024  # twice what a kernel takes of arguments and variables
MAX_COMMAND = 1024 * 1024
FOREVER = 2**31 - 1  # seconds; Kubernetes bounds neither a pod's grace period nor a probe's time

_LABEL = r"[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_HOSTNAME = re.compile(rf"(?=.{{1,64}}\Z){_LABEL}(?:\.{_LABEL})*")


def name(value: str, field: str) -> None:
    """Check a required name."""
    if not value:
        raise InvalidArgument(f"{field} is empty")
    if len(value) > MAX_NAME:
        raise InvalidArgument(f"{field} has {len(value)} characters, over {MAX_NAME}")
    if not value.isprintable():
        raise InvalidArgument(f"{field} has characters that can't be printed")


def sandbox_config(config: cri.PodSandboxConfig) -> None:
    """Check RunPodSandbox's configuration."""
    if not config.HasField("metadata"):
        raise InvalidArgument("config.metadata is missing")
    for field in ("name", "namespace", "uid"):
        name(getattr(config.metadata, field), f"config.metadata.{field}")
    _size(config, MAX_SANDBOX_CONFIG)
    if config.hostname and not _HOSTNAME.fullmatch(config.hostname):
        raise InvalidArgument("config.hostname is not a host name of up to 64 letters, digits, '-' and '.'")
    if config.log_directory:
        _absolute(config.log_directory, "config.log_directory")
    read_annotations(config.annotations)
    mappings.host_ports_of(config)
    if config.linux.cgroup_parent:
        group_path(config.linux.cgroup_parent)
    namespaces(config.linux.security_context.namespace_options, "config.linux.security_context")


def namespaces(options: cri.NamespaceOption, field: str) -> None:
    """Check the namespaces that a pod asks for. NODE means the VM's own."""
    if options.network in (cri.CONTAINER, cri.TARGET):
        raise InvalidArgument(
            f"{field}.namespace_options.network: {cri.NamespaceMode.Name(options.network)}: the containers "
            "of a pod share the VM's network; ask for POD"
        )
    user_namespace(options, f"{field}.namespace_options")


def container_config(config: cri.ContainerConfig) -> None:
    """Check CreateContainer's configuration."""
    if not config.HasField("metadata"):
        raise InvalidArgument("config.metadata is missing")
    name(config.metadata.name, "config.metadata.name")
    if not config.image.image:
        raise InvalidArgument("config.image.image is empty")
    _size(config, MAX_CONTAINER_CONFIG)
    log_path(config.log_path)
    mounts.check(config.mounts)
    for index, env in enumerate(config.envs):
        _environment(env, f"config.envs[{index}]")
    for index, device in enumerate(config.devices):
        for kind in ("host_path", "container_path"):
            path = getattr(device, kind)
            if path or kind == "host_path":
                _absolute(path, f"config.devices[{index}].{kind}")
    cpusets.check(config.linux.resources, "config.linux.resources")
    security = config.linux.security_context
    namespaces(security.namespace_options, "config.linux.security_context")
    if config.CDI_devices:
        raise InvalidArgument(
            f"config.CDI_devices[0] ({config.CDI_devices[0].name[:256]}): "
            "a VM has no devices of the node's, by CDI or otherwise, but disks: ask for a raw volume "
            "(volumeMode: Block)"
        )


def log_path(path: str) -> None:
    """Check a log's path, which must be below the sandbox's log directory; "": there is no log."""
    if not path:
        return
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or "\0" in path or len(path) > 4096 or path.endswith("/"):
        raise InvalidArgument("config.log_path has to be a file's path below the sandbox's log_directory")


def _environment(env: cri.KeyValue, field: str) -> None:
    if not env.key or "=" in env.key or "\0" in env.key:
        raise InvalidArgument(f"{field}.key is not a variable's name")
    if b"\0" in env.value:  # any other bytes may be there, as of a Secret
        raise InvalidArgument(f"{field}.value ({env.key[:64]}) has a zero byte, which ends a variable")


def _size(config: cri.PodSandboxConfig | cri.ContainerConfig, most: int) -> None:
    if config.ByteSize() > most:
        raise InvalidArgument(f"config has {config.ByteSize()} bytes, over {most}")


def _absolute(path: str, field: str) -> None:
    if not path.startswith("/") or "\0" in path or len(path) > 4096 or ".." in path.split("/"):
        raise InvalidArgument(f"{field} has to be an absolute path without '..'")


def seconds(value: int, field: str) -> int:
    """Return `value`, or `FOREVER` if it is more than that."""
    if value < 0:
        raise InvalidArgument(f"{field} is {value} seconds, less than none")
    return min(value, FOREVER)


def command(words: Iterable[str]) -> list[str]:
    """Return a command, of at least one word, as a list."""
    command = list(words)
    if not command or not command[0]:
        raise InvalidArgument("cmd is empty: give the program and its arguments")
    if sum(map(len, command)) > MAX_COMMAND:
        raise InvalidArgument(f"cmd is over {MAX_COMMAND} characters")
    return command


def labels_match(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether the labels have every key of the selector with its value."""
    return all(labels.get(key) == value for key, value in selector.items())
