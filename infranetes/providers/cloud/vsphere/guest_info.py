# SPDX-License-Identifier: Apache-2.0
"""What a guest without our agent is told by guestinfo, as cloud-init's datasource VMware reads it. No I/O.

Source: cloud-init's manual, "VMware". VMware Tools in the guest read guestinfo for it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from infranetes_common.identity import Network

USER_DATA, META_DATA = "guestinfo.userdata", "guestinfo.metadata"


def options(name: str, user_data: bytes, network: Network | None) -> Mapping[str, str]:
    """Return the entries of extraConfig. :param user_data: b"": nothing is to be told but an address.

    :param network: what the node gives the VM; None: DHCP gives an address."""
    if not user_data and network is None:
        return {}
    meta_data: dict[str, object] = {"instance-id": name}
    if network is not None:
        meta_data["network"] = _network(network)
    told = {META_DATA: json.dumps(meta_data).encode(), **({USER_DATA: user_data} if user_data else {})}
    encoded = {key: base64.b64encode(content).decode() for key, content in told.items()}
    return {**encoded, **{f"{key}.encoding": "base64" for key in told}}


def _network(network: Network) -> Mapping[str, object]:
    """Return cloud-init's configuration of the VM's card, version 2."""
    card = {
        "match": {"macaddress": network.mac.lower()},
        "dhcp4": False,
        "addresses": [network.address],
        "routes": [{"to": "0.0.0.0/0", "via": network.gateway}],
    }
    return {"version": 2, "ethernets": {"pod": card}}
