# SPDX-License-Identifier: Apache-2.0
"""What is told of a pod that is kept, beside its VM's files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime

from infranetes.pods.keeping.archive import Measured
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.store.states import ALIVE
from infranetes.providers.keeping import KeptVm
from infranetes_common import __version__

FORMAT = 1  # raised whenever a reader of the one before would misread it
_NANOS = 10**9
_CRI = "io.kubernetes.cri"  # the prefix of containerd's annotations, which tools for checkpoints read


def manifest(
    sandbox: Sandbox, container: Container | None, kept: KeptVm, files: Mapping[str, Measured]
) -> bytes:
    """Return the manifest of a pod that was kept, as JSON.

    :param container: the one that was asked for; None: the pod was. :param files: by their names.
    """
    metadata = sandbox.config.metadata
    return _json(
        {
            "format": FORMAT,
            "infranetes": __version__,
            "takenAt": _time(kept.taken_at),
            "pauseSeconds": round(kept.pause_seconds, 6),
            "scope": "the pod's whole VM, with all of its containers",
            "secrets": "as they were: whatever the pod's memory and disk had is in the files",
            "machine": dict(kept.machine),
            "provider": sandbox.record.provider,
            "pod": {
                "namespace": metadata.namespace,
                "name": metadata.name,
                "uid": metadata.uid,
                "sandbox": sandbox.id,
                "configSha256": _digest(sandbox.record.config),
            },
            "container": container.id if container is not None else "",
            "containers": [
                _container(each) for each in sandbox.containers.values() if each.state in ALIVE
            ],
            "files": {
                name: {"bytes": each.size, "sha256": each.sha256} for name, each in sorted(files.items())
            },
        }
    )  # fmt: skip


def _container(container: Container) -> dict[str, object]:
    record = container.record
    return {
        "name": container.config.metadata.name,
        "attempt": container.config.metadata.attempt,
        "id": container.id,
        "state": container.state.value,
        "image": container.config.image.image,
        "imageRef": record.image_ref,
        "imageId": record.image_id,
        "configSha256": _digest(record.config),
        "createdAt": _time(record.created_at / _NANOS),
        "startedAt": _time(record.started_at / _NANOS) if record.started_at else "",
    }


def config_dump(container: Container, taken_at: float) -> bytes:
    """Return what tools for checkpoints know as config.dump: which container it was, and its image."""
    record = container.record
    return _json(
        {
            "id": container.id,
            "name": container.config.metadata.name,
            "rootfsImage": record.image_id,
            "rootfsImageRef": record.image_ref,
            "rootfsImageName": container.config.image.user_specified_image or container.config.image.image,
            "runtime": "infranetes",
            "createdTime": _time(record.created_at / _NANOS),
            "checkpointedTime": _time(taken_at),
        }
    )


def spec_dump(container: Container) -> bytes:
    """Return what tools for checkpoints know as spec.dump: of an OCI specification, what the CRI gave.

    Environment and mounts are left out."""
    config, metadata = container.config, container.sandbox.config.metadata
    annotations = {
        "container-type": "container",
        "container-name": config.metadata.name,
        "image-name": config.image.user_specified_image or config.image.image,
        "sandbox-id": container.sandbox.id,
        "sandbox-name": metadata.name,
        "sandbox-namespace": metadata.namespace,
        "sandbox-uid": metadata.uid,
    }
    return _json(
        {
            "ociVersion": "1.0.2",
            "process": {"args": [*config.command, *config.args], "cwd": config.working_dir or "/"},
            "annotations": {f"{_CRI}.{name}": value for name, value in annotations.items()},
        }
    )


def _digest(config: bytes) -> str:
    return hashlib.sha256(config).hexdigest()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json(fields: Mapping[str, object]) -> bytes:
    return (json.dumps(fields, indent=2) + "\n").encode()
