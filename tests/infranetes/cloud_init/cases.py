# SPDX-License-Identifier: Apache-2.0
"""What tests of guests' CDs share."""

from __future__ import annotations

import email
from collections.abc import Mapping
from email.message import Message

import yaml

from infranetes.cloud_init.configuration import configuration
from infranetes.cloud_init.document import GuestDocument, HostKey
from infranetes.providers.machine_images import Cd
from infranetes_common.identity import Network

NODE_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDIhz2GK/XCUj4i6Q5yQJNL1MKqHbhzwLR8HCNbpO3fV node"
PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKoHn0k7xkwrHjHoYkZMXiDzDvWcVXXkmQyR1tVYyK9D"
PRIVATE = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\n-----END OPENSSH PRIVATE KEY-----\n"
HOST_KEY = HostKey(PRIVATE, PUBLIC)
NETWORK = Network("52:54:00:AB:cd:ef", "10.88.0.7/16", "10.88.0.1")


def cds(document: GuestDocument, network: Network = NETWORK) -> tuple[Cd, ...]:
    """Return the CDs of a guest that has some."""
    made = configuration(document)
    assert made is not None
    return made.cds(network)


def files(document: GuestDocument, network: Network = NETWORK) -> Mapping[str, bytes]:
    """Return the files of a guest's first CD."""
    return cds(document, network)[0].files


def user_data(document: GuestDocument) -> bytes:
    """Return the user-data of a guest with NoCloud or ConfigDrive."""
    found = files(document)
    return found.get("user-data", found.get("openstack/latest/user_data", b""))


def parts(content: bytes) -> list[tuple[str, bytes]]:
    """Return the parts of user-data, by kind, as who reads MIME finds them."""
    message: Message[str, str] = email.message_from_bytes(content)
    found = []
    for part in message.walk():
        if not part.is_multipart():
            payload = part.get_payload(decode=True)
            assert isinstance(payload, bytes)
            found.append((part.get_content_type(), payload))
    return found


def config(content: bytes) -> dict[str, object]:
    """Return a #cloud-config as YAML has it."""
    assert content.startswith(b"#cloud-config\n"), content[:80]
    found = yaml.safe_load(content)
    assert isinstance(found, dict)
    return found


def added(document: GuestDocument) -> dict[str, object]:
    """Return what Infranetes adds to user-data, host key included."""
    whole = user_data(document)
    if whole.startswith(b"#cloud-config"):
        return config(whole)
    found: dict[str, object] = {}
    for kind, content in parts(whole):
        if kind == "text/cloud-config":
            found |= config(content)
    return found
