# SPDX-License-Identifier: Apache-2.0
"""The body of a request for a server (source: Compute API, "Create Server")."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from infranetes.providers.cloud.interface import ADDRESS, CLUSTER, NODE, TOKEN, LaunchRequest
from infranetes.providers.cloud.openstack.names import name_of, tag
from infranetes.providers.cloud.openstack.settings import Settings

_PARTS = "infranetes-identity"  # in a server's metadata: how many parts of the next identity there are
_LONGEST_VALUE = 255  # characters
ZONE = "infranetes-zone"  # in a server's metadata: the zone in which it was asked for


def server(
    settings: Settings,
    request: LaunchRequest,
    flavor: str,
    image: str,
    network: str,
    address: str,
    volume_gib: int,
) -> Mapping[str, object]:
    """Return the body.

    :param flavor: its id, and so are `image` and `network`.
    :param volume_gib: the size of the root disk as a volume; 0: it is the flavor's own disk.
    :param address: the floating address that it shall get; "": none."""
    groups = request.wishes.security_groups or settings.security_groups
    content: dict[str, object] = {
        "name": name_of(request.token, request.number),
        "flavorRef": flavor,
        "networks": [{"uuid": network}],
        "metadata": metadata(request, address),
        "tags": [tag(key, request.tags[key]) for key in (CLUSTER, NODE, TOKEN)],
    }
    if request.identity:
        content["user_data"] = base64.b64encode(request.identity).decode()
    if volume_gib:
        content["block_device_mapping_v2"] = [_volume(settings, image, volume_gib)]
    else:
        content["imageRef"] = image
    if groups:
        content["security_groups"] = [{"name": group} for group in groups]
    if request.zone:
        content["availability_zone"] = request.zone
    hints = {"os:scheduler_hints": {"group": settings.server_group}} if settings.server_group else {}
    return {"server": content, **hints}


def metadata(request: LaunchRequest, address: str) -> Mapping[str, str]:
    """Return the server's metadata, which says whose it is: lists show it whole, unlike tags."""
    return {
        **request.tags,
        **({ADDRESS: address} if address else {}),
        **({ZONE: request.zone} if request.zone else {}),
    }


def _volume(settings: Settings, image: str, gib: int) -> Mapping[str, object]:
    """Return the root disk as a volume, which is deleted with the server."""
    return {
        "boot_index": 0,
        "uuid": image,
        "source_type": "image",
        "destination_type": "volume",
        "volume_size": gib,
        "delete_on_termination": True,
        **({"volume_type": settings.disk_type} if settings.disk_type else {}),
    }


def identity_in_parts(identity: bytes) -> Mapping[str, str]:
    """Return an identity as metadata, whose values are short (source: Compute API, "Create or Update Metadata
    Items"); b"": none, which has the agent wait for one."""
    text = identity.decode()
    parts = [text[at : at + _LONGEST_VALUE] for at in range(0, len(text), _LONGEST_VALUE)]
    numbered = {f"{_PARTS}-{number}": part for number, part in enumerate(parts, start=1)}
    return {_PARTS: str(len(parts)), **numbered}
