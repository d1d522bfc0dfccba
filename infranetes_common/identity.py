"""What makes a freshly started machine one sandbox's VM, carried by the hypervisor's own channel.

The document is JSON: over virtio-serial as one line, as user-data or guestinfo on clouds, as a file
of mode 0600 otherwise. It holds a private key, so it is never logged.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from infranetes_common.errors import InvalidArgument

MAX_DOCUMENT_BYTES = 64 * 1024


@attrs.frozen
class Network:
    """Addresses that the machine gives its first network card; absent where the IaaS gives them."""

    mac: str  # aa:bb:cc:dd:ee:ff
    address: str  # IPv4 with prefix length: 10.88.0.7/16
    gateway: str
    mtu: int = 1500


@attrs.frozen
class Identity:
    """One VM's identity. PEM texts; `sandbox_id` is what the certificate names."""

    sandbox_id: str
    certificate_pem: str
    key_pem: str = attrs.field(repr=False)
    ca_pem: str
    listen: str = "0.0.0.0:2475"  # host:port of the agent's TLS listener
    hostname: str = ""
    machine_id: str = ""  # 32 hex digits; empty: leave the machine's own
    entropy: str = attrs.field(default="", repr=False)  # hex, mixed into the kernel's pool
    now_nanos: int = 0  # nanoseconds since 1970 UTC to set the clock to; 0: leave it
    network: Network | None = None


def encode(identity: Identity) -> bytes:
    """One line of JSON, newline included."""
    return json.dumps(attrs.asdict(identity), separators=(",", ":")).encode() + b"\n"


def decode(document: bytes) -> Identity:
    """The identity in `document`.

    :raise InvalidArgument: not such a document; the message never quotes it.
    """
    if len(document) > MAX_DOCUMENT_BYTES:
        raise InvalidArgument(f"the identity document is over {MAX_DOCUMENT_BYTES} bytes")
    try:
        fields: dict[str, Any] = json.loads(document)
        network = fields.pop("network", None)
        identity = Identity(**fields, network=None if network is None else Network(**network))
    except (ValueError, TypeError, AttributeError):
        raise InvalidArgument("the identity document is not the JSON object that the node writes") from None
    if not (identity.sandbox_id and identity.certificate_pem and identity.key_pem and identity.ca_pem):
        raise InvalidArgument("the identity document lacks the sandbox id, certificate, key or CA")
    return identity
