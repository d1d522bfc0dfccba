# SPDX-License-Identifier: Apache-2.0
"""Elastic addresses and disks: what can outlive an instance.

libcloud allocates addresses without tags, and lists addresses and disks without filters, so that ours could
not be told from others: the requests are made here.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from infranetes.providers.cloud.aws.driver import Driver, items, text
from infranetes.providers.cloud.aws.errors import classify
from infranetes.providers.cloud.aws.libcloud_types import Element
from infranetes.providers.cloud.interface import (
    CLUSTER,
    NODE,
    TOKEN,
    CloudError,
    CloudVM,
    ErrorKind,
    Leftover,
)


@attrs.frozen
class ElasticAddress:
    """An elastic address of the account."""

    id: str
    address: str
    token: str
    instance_id: str
    association_id: str


@attrs.frozen
class Association:
    """An address' association with an instance."""

    address_id: str
    id: str


def tag_parameters(kind: str, tags: Mapping[str, str], number: int = 1) -> dict[str, str]:
    """Return parameters that tag a resource when it is created."""
    root = f"TagSpecification.{number}"
    parameters = {f"{root}.ResourceType": kind}
    for count, (key, value) in enumerate(tags.items(), start=1):
        parameters[f"{root}.Tag.{count}.Key"] = key
        parameters[f"{root}.Tag.{count}.Value"] = value
    return parameters


def filter_parameters(filters: Mapping[str, str], first: int = 1) -> dict[str, str]:
    """Return parameters that restrict a list. :param first: the number of the first of them."""
    parameters = {}
    for count, (name, value) in enumerate(filters.items(), start=first):
        parameters[f"Filter.{count}.Name"] = name
        parameters[f"Filter.{count}.Value.1"] = value
    return parameters


def _thd_list(driver: Driver, filters: Mapping[str, str]) -> list[ElasticAddress]:
    answer = driver.request("DescribeAddresses", **filter_parameters(filters))
    return [
        ElasticAddress(
            id=text(each, "allocationId"),
            address=text(each, "publicIp"),
            token=_tag(each, TOKEN),
            instance_id=text(each, "instanceId"),
            association_id=text(each, "associationId"),
        )
        for each in items(answer, "addressesSet/item")
    ]


def _thd_associate(driver: Driver, vm: CloudVM, tags: Mapping[str, str]) -> Association | None:
    """Give an instance its wanted address. A new address gets `tags`. Returns None if it has it already."""
    if vm.wanted_address == "new":
        allocated = _thd_list(driver, {f"tag:{TOKEN}": vm.token})
        if not allocated:
            parameters = {"Domain": "vpc", **tag_parameters("elastic-ip", tags)}
            answer = driver.request("AllocateAddress", **parameters)
            id, holder = text(answer, "allocationId"), ""
        else:
            id, holder = allocated[0].id, allocated[0].instance_id
    else:
        id, holder = vm.wanted_address, ""
    if holder == vm.id:
        return None
    answer = driver.request("AssociateAddress", InstanceId=vm.id, AllocationId=id)
    return Association(id, text(answer, "associationId"))


def _thd_release_of(driver: Driver, token: str, given: Association | None) -> None:
    """Release the addresses that were allocated for an instance. :param given: what is known of it."""
    if given is not None:
        _thd_release_address(driver, given.address_id, given.id)
        return
    for address in _thd_list(driver, {f"tag:{TOKEN}": token}):
        _thd_release_address(driver, address.id, address.association_id)


def _thd_release_address(driver: Driver, id: str, association_id: str = "") -> None:
    if association_id:
        _ignoring_missing(driver, "DisassociateAddress", AssociationId=association_id)
    _ignoring_missing(driver, "ReleaseAddress", AllocationId=id)


def _thd_leftovers(driver: Driver, cluster: str, node: str) -> list[Leftover]:
    """Return addresses and disks of ours that no instance uses."""
    ours = {f"tag:{CLUSTER}": cluster, f"tag:{NODE}": node}
    leftovers = [
        Leftover(address.id, "address", address.token)
        for address in _thd_list(driver, ours)
        if not address.instance_id and not address.association_id
    ]
    answer = driver.request("DescribeVolumes", **filter_parameters({**ours, "status": "available"}))
    leftovers += [
        Leftover(text(each, "volumeId"), "disk", _tag(each, TOKEN))
        for each in items(answer, "volumeSet/item")
    ]
    return leftovers


def _thd_release(driver: Driver, leftover: Leftover) -> None:
    """Release an address or a disk. Idempotent."""
    if leftover.kind == "address":
        _thd_release_address(driver, leftover.id)
    else:
        _ignoring_missing(driver, "DeleteVolume", VolumeId=leftover.id)


def _ignoring_missing(driver: Driver, action: str, **parameters: str) -> None:
    try:
        driver.request(action, **parameters)
    except Exception as error:
        cloud_error = error if isinstance(error, CloudError) else classify(error)
        if cloud_error is None or cloud_error.kind is not ErrorKind.NOT_FOUND:
            raise


def _tag(element: Element, key: str) -> str:
    for tag in items(element, "tagSet/item"):
        if text(tag, "key") == key:
            return text(tag, "value")
    return ""
