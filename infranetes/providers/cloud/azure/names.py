# SPDX-License-Identifier: Apache-2.0
"""Names of Azure's resources (source: "Naming rules and restrictions for Azure resources").

A pod's VM, its network interface, disk and public address have one name: Azure tells them apart by type. A
resource's id is its path below `/subscriptions`; Azure spells it in upper and lower case as it likes.
"""

from __future__ import annotations

import hashlib
import re

import attrs

UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
GROUP = r"[A-Za-z0-9_().-]{0,89}[A-Za-z0-9_()-]"
NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,78}[A-Za-z0-9_])?"
LOCATION = r"[a-z0-9]{2,32}"
ZONE = r"[1-9]"
_PROVIDERS = rf"/?subscriptions/{UUID}/resourceGroups/{GROUP}/providers"
_VERSION = r"(?:latest|[0-9]{1,10}\.[0-9]{1,10}\.[0-9]{1,10})"
IMAGE = (
    rf"{NAME}/{NAME}(?:/{_VERSION})?"
    rf"|{_PROVIDERS}/Microsoft\.Compute/galleries/{NAME}/images/{NAME}(?:/versions/{_VERSION})?"
)
SUBNET = rf"{NAME}/{NAME}|{_PROVIDERS}/Microsoft\.Network/virtualNetworks/{NAME}/subnets/{NAME}"
SECURITY_GROUP = rf"{NAME}|{_PROVIDERS}/Microsoft\.Network/networkSecurityGroups/{NAME}"
APPLICATION_GROUP = rf"{NAME}|{_PROVIDERS}/Microsoft\.Network/applicationSecurityGroups/{NAME}"
IDENTITY = rf"{NAME}|{_PROVIDERS}/Microsoft\.ManagedIdentity/userAssignedIdentities/{NAME}"

_ID = re.compile(r"infranetes-[0-9a-z]{1,40}-[0-9]{1,5}")


def name_of(token: str, number: int) -> str:
    """Return a VM's name. Names are unique in a resource group, so it is the idempotency key, too."""
    return f"infranetes-{token}-{number}"


def hashed_name_of(kind: str, cluster: str, name: str) -> str:
    """Return the name of a cluster's volume or snapshot, which is its idempotency key, too.

    :param kind: `volume` or `snapshot`."""
    digest = hashlib.sha256(f"{len(cluster)} {cluster} {name}".encode()).hexdigest()
    return f"infranetes-{kind}-{digest[:40]}"


def is_name(text: str) -> bool:
    """Return whether a resource of the group could have this name."""
    return re.fullmatch(NAME, text) is not None


def is_id(text: str) -> bool:
    """Return whether `name_of` could have returned this."""
    return _ID.fullmatch(text) is not None


def kind_of(id: str) -> str:
    """Return the kind of the resource with this id, such as `microsoft.compute/disks`, in lower case."""
    provider, _, rest = id.lower().rpartition("/providers/")[2].partition("/")
    return f"{provider}/{rest.partition('/')[0]}"


def last(id: str) -> str:
    """Return the name in a resource's id."""
    return id.rpartition("/")[2]


@attrs.frozen
class Group:
    """A resource group. :ivar path: its id."""

    subscription: str
    name: str

    @property
    def path(self) -> str:
        return f"/subscriptions/{self.subscription}/resourceGroups/{self.name}"

    def holds(self, id: str) -> bool:
        """Return whether a resource with this id is in the group."""
        return id.lower().startswith(f"{self.path}/".lower())

    def resource(self, kind: str, name: str) -> str:
        """Return the id of a resource of the group. :param kind: such as `Microsoft.Compute/disks`."""
        return f"{self.path}/providers/{kind}/{name}"

    def named(self, kind: str, text: str) -> str:
        """Return the id of a resource that is given as an id, or by its name if it is in the group."""
        return _id(text) if "/" in text else self.resource(kind, text)

    def subnet(self, text: str) -> str:
        """Return the id of a subnet that is given as an id, or as NETWORK/SUBNET."""
        if text.count("/") > 1:
            return _id(text)
        network, _, subnet = text.partition("/")
        return f"{self.resource('Microsoft.Network/virtualNetworks', network)}/subnets/{subnet}"

    def image(self, text: str) -> str:
        """Return the id of an image, or of a version of it, that is given as an id or as
        GALLERY/IMAGE[/VERSION]. Without a version it is the newest one."""
        if "subscriptions/" in text:
            found = _id(text)
        else:
            gallery, image, *version = text.split("/")
            found = f"{self.resource('Microsoft.Compute/galleries', gallery)}/images/{image}"
            found += f"/versions/{version[0]}" if version else ""
        return found.removesuffix("/versions/latest")


def definition_of(image: str) -> str:
    """Return the id of the image that this is, or is a version of."""
    return image.partition("/versions/")[0]


def _id(text: str) -> str:
    return text if text.startswith("/") else f"/{text}"
