# SPDX-License-Identifier: Apache-2.0
"""Cinder's resources as its API shows them (source: API reference, and Cinder's samples for the fields)."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from tests.support.clouds.nova_resources import PROJECT, USER, Json, links, new_id


def now() -> str:
    """Return the time as Cinder writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")


def volume(asked: Json, size: int, kind: str, zone: str, project: str = PROJECT) -> Json:
    """Return a newly requested volume."""
    id = new_id()
    return {
        "id": id,
        "name": asked.get("name"),
        "description": asked.get("description"),
        "size": size,
        "status": "creating",
        "availability_zone": zone,
        "metadata": dict(asked.get("metadata") or {}),
        "volume_type": kind,
        "multiattach": False,
        "snapshot_id": asked.get("snapshot_id"),
        "source_volid": asked.get("source_volid"),
        "created_at": now(),
        "updated_at": None,
        "bootable": "false",
        "encrypted": False,
        "consistencygroup_id": None,
        "group_id": None,
        "replication_status": None,
        "service_uuid": None,
        "shared_targets": False,
        "links": links("volumes", id),
        "user_id": USER,
        "os-vol-tenant-attr:tenant_id": project,
    }


def snapshot(asked: Json, size: int, project: str = PROJECT) -> Json:
    """Return a newly requested snapshot."""
    return {
        "id": new_id(),
        "name": asked.get("name"),
        "description": asked.get("description"),
        "volume_id": asked["volume_id"],
        "size": size,
        "status": "creating",
        "metadata": dict(asked.get("metadata") or {}),
        "created_at": now(),
        "updated_at": None,
        "user_id": USER,
        "group_snapshot_id": None,
        "os-extended-snapshot-attributes:progress": "0%",
        "os-extended-snapshot-attributes:project_id": project,
    }


def message(resource: str, words: str) -> Json:
    """Return a message for users about a volume or snapshot."""
    id = new_id()
    return {
        "id": id,
        "event_id": "VOLUME_VOLUME_001_003",
        "user_message": words,
        "message_level": "ERROR",
        "created_at": now(),
        "guaranteed_until": now(),
        "request_id": f"req-{secrets.token_hex(8)}",
        "links": links("messages", id),
        "resource_type": "VOLUME",
        "resource_uuid": resource,
    }
