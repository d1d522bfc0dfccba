# SPDX-License-Identifier: Apache-2.0
"""The shape of pods and containers: the parts of their configurations that can't change in a VM that goes on.

Each part is a digest, so that what differs can be named, and a record has nothing of what it says. The rest,
such as names, environment, files' contents and addresses, is the new pod's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from google.protobuf.message import Message

from infranetes.pods.node.handlers import Handler
from infranetes.pods.vm.container_providers import container_provider
from infranetes.providers.annotation_rows import PREFIX
from infranetes.providers.interface import Size
from infranetes_common.wire import cri

TEMPLATES = ("pod-template-hash", "controller-revision-hash")
"""Labels by which Kubernetes tells the pods of one version of a workload from those of another."""

_FIELDS = ("command", "args", "working_dir", "stdin", "stdin_once", "tty", "devices", "CDI_devices")

Shape = Mapping[str, str]
"""Digests, by what they are of."""


def shape_of_container(config: cri.ContainerConfig, image_id: str) -> Shape:
    """Return the shape of a container.

    :param config: as the CRI has it."""
    context = cri.LinuxContainerSecurityContext()
    context.CopyFrom(config.linux.security_context)
    context.namespace_options.target_id = ""  # of the one pod
    return {
        "image": _digest([image_id]),
        **{name: _digest(_parts(getattr(config, name))) for name in _FIELDS},
        "mounts": _digest(sorted(map(_place, config.mounts))),
        "security_context": _digest([_bytes(context)]),
    }


def shape_of_pod(default: str, handler: Handler, config: cri.PodSandboxConfig, asked: Size) -> Shape:
    """Return the shape of a pod without its containers.

    :param default: what runs containers on this node, see `container_provider`.
    :param asked: the size of its VM, as it asks for it."""
    linux, size = config.linux, handler.sized(asked)
    memory = f"{size.memory_bytes >> 20} MiB, {size.huge_bytes >> 20} MiB in huge pages"
    sysctls = [f"{name}={value}" for name, value in sorted(linux.sysctls.items())]
    return {
        "size of the VM": f"{size.cpu_millis}m, {memory}",
        "size of the VM's disk": handler.vm_annotations(config.annotations).get(PREFIX + "disk", ""),
        "container provider": container_provider(default, config, handler),
        "sysctls": _digest(sysctls),
        "security context": _digest([_bytes(linux.security_context)]),
    }


def template_of(config: cri.PodSandboxConfig) -> str:
    """Return what tells the version of the workload that a pod is of; "": nothing does."""
    return next((config.labels[name] for name in TEMPLATES if config.labels.get(name)), "")


def difference(kept: Shape, other: Shape) -> str | None:
    """Return the first part in which two shapes differ; None: they are the same."""
    return next((name for name in (*kept, *other) if kept.get(name) != other.get(name)), None)


def _place(mount: cri.Mount) -> str:
    fields = (
        mount.container_path,
        mount.readonly,
        mount.recursive_read_only,
        mount.propagation,
        mount.image.image,
        mount.image_sub_path,
    )
    return repr(fields)


def _parts(value: str | bool | Iterable[str | Message]) -> list[str | bytes]:
    if isinstance(value, str | bool):
        return [str(value)]
    return [each if isinstance(each, str) else _bytes(each) for each in value]


def _bytes(message: Message) -> bytes:
    content: bytes = message.SerializeToString(deterministic=True)
    return content


def _digest(parts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else part.encode()
        digest.update(f"{len(content)}:".encode() + content)
    return digest.hexdigest()[:32]
