# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of Azure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar, Literal

import attrs

from infranetes.providers.cloud.azure.names import (
    APPLICATION_GROUP,
    GROUP,
    IDENTITY,
    IMAGE,
    LOCATION,
    NAME,
    SECURITY_GROUP,
    SUBNET,
    UUID,
    ZONE,
)
from infranetes.providers.cloud.azure.secret_files import thd_read
from infranetes.providers.cloud.settings import ENDPOINT, CloudSettings, all_of, matching, not_empty
from infranetes_common import config_outside as outside

_application_groups = all_of(APPLICATION_GROUP, "application security groups' names or ids")


def _secret(key: str, path: str) -> Iterator[outside.Finding]:
    return outside.tried(lambda: thd_read(path, key), key)


@attrs.frozen(kw_only=True)
class Settings(CloudSettings):
    """The table `providers.azure`."""

    TENANT_KEYS: ClassVar[tuple[str, ...]] = (
        "subscription",
        "resource_group",
        "tenant",
        "client_id",
        "secret_file",
        "federated_token_file",
        "image",
        "image_galleries",
        "subnet",
        "security_group",
        "application_security_groups",
        "pod_identity",
        "public_address",
    )

    subscription: str = attrs.field(validator=[not_empty, matching(UUID, "a subscription's id")])
    resource_group: str = attrs.field(validator=[not_empty, matching(GROUP, "a resource group's name")])
    location: str = attrs.field(validator=[not_empty, matching(LOCATION, "a name such as westeurope")])
    # Tried in this order; empty: VMs are put into no zone.
    zones: tuple[str, ...] = attrs.field(default=(), validator=all_of(ZONE, "zones, such as 1,"))
    image: str = attrs.field(
        validator=[not_empty, matching(IMAGE, "GALLERY/IMAGE, GALLERY/IMAGE/VERSION, or an image's id")]
    )  # the image of a guest with our agent
    subnet: str = attrs.field(validator=[not_empty, matching(SUBNET, "NETWORK/SUBNET, or a subnet's id")])
    security_group: str = attrs.field(
        default="", validator=matching(SECURITY_GROUP, "a network security group's name or id")
    )
    application_security_groups: tuple[str, ...] = attrs.field(default=(), validator=_application_groups)
    pod_identity: str = attrs.field(
        default="", validator=matching(IDENTITY, "a user-assigned identity's name or id")
    )
    public_address: bool = False  # for pods without an annotation
    disk_gib: int = attrs.field(default=0, validator=attrs.validators.ge(0))  # 0: as the image has it
    disk_type: Literal["Standard_LRS", "StandardSSD_LRS", "StandardSSD_ZRS", "Premium_LRS", "Premium_ZRS"] = (
        "StandardSSD_LRS"
    )
    volume_type: Literal[
        "Standard_LRS", "StandardSSD_LRS", "StandardSSD_ZRS", "Premium_LRS", "Premium_ZRS", "PremiumV2_LRS"
    ] = "StandardSSD_LRS"
    image_galleries: tuple[str, ...] = attrs.field(default=(), validator=all_of(NAME, "galleries' names"))
    sizes: tuple[str, ...] = ("Standard_B*", "Standard_D*", "Standard_E*", "Standard_F*", "Standard_NC*")
    environment: Literal["AzureCloud", "AzureChinaCloud", "AzureUSGovernment"] = "AzureCloud"
    tenant: str = attrs.field(default="", validator=matching(UUID, "a tenant's id"))
    # The client id of an application, or of one of several user-assigned identities of the node's VM.
    client_id: str = attrs.field(default="", validator=matching(UUID, "a client's id"))
    # Holds the application's secret.
    secret_file: str = attrs.field(default="", metadata=outside.names(partial(_secret, "secret_file")))
    # In place of a secret; if neither is set, the node's own managed identity is used.
    federated_token_file: str = attrs.field(
        default="", metadata=outside.names(partial(_secret, "federated_token_file"))
    )
    endpoint: str = attrs.field(default="", validator=matching(ENDPOINT, "https://HOST"))
    login_endpoint: str = attrs.field(default="", validator=matching(ENDPOINT, "https://HOST"))
    price_endpoint: str = attrs.field(default="", validator=matching(ENDPOINT, "https://HOST"))
    # A file with one's own prices, see `own_prices`.
    prices_file: str = attrs.field(default="", metadata=outside.names(outside.file))
    metadata_endpoint: str = attrs.field(default="", validator=matching(ENDPOINT, "http://HOST"))

    def __attrs_post_init__(self) -> None:
        if self.secret_file and self.federated_token_file:
            raise ValueError("secret_file and federated_token_file exclude each other: give one")
        if (self.secret_file or self.federated_token_file) and not (self.tenant and self.client_id):
            raise ValueError("secret_file and federated_token_file need tenant and client_id")
