"""Elastic addresses and disks: what can outlive an instance.

libcloud allocates addresses without tags and lists them without filters, and lists disks likewise: of
these, what is ours could not be told from what is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from infranetes.providers.cloud.aws.driver import Driver, items, text
from infranetes.providers.cloud.interface import CLUSTER, NODE, TOKEN, CloudError, Found, Leftover, Trouble


@attrs.frozen
class Elastic:
    """One elastic address."""

    id: str
    address: str
    token: str
    instance_id: str
    association_id: str


def tag_parameters(kind: str, tags: Mapping[str, str], number: int = 1) -> dict[str, str]:
    """Parameters that give a resource its tags when it is made."""
    root = f"TagSpecification.{number}"
    parameters = {f"{root}.ResourceType": kind}
    for count, (key, value) in enumerate(tags.items(), start=1):
        parameters[f"{root}.Tag.{count}.Key"] = key
        parameters[f"{root}.Tag.{count}.Value"] = value
    return parameters


def filter_parameters(filters: Mapping[str, str]) -> dict[str, str]:
    """Parameters that restrict a list."""
    parameters = {}
    for count, (name, value) in enumerate(filters.items(), start=1):
        parameters[f"Filter.{count}.Name"] = name
        parameters[f"Filter.{count}.Value.1"] = value
    return parameters


def _thd_elastic(driver: Driver, filters: Mapping[str, str]) -> list[Elastic]:
    """Addresses of the account."""
    answer = driver.ask("DescribeAddresses", **filter_parameters(filters))
    return [
        Elastic(
            id=text(each, "allocationId"),
            address=text(each, "publicIp"),
            token=_tag(each, TOKEN),
            instance_id=text(each, "instanceId"),
            association_id=text(each, "associationId"),
        )
        for each in items(answer, "addressesSet/item")
    ]


def _thd_associate(driver: Driver, found: Found, tags: Mapping[str, str]) -> None:
    """Give an instance the address that it wants; one that is made for it has its tags."""
    if found.wanted_address == "new":
        mine = _thd_elastic(driver, {f"tag:{TOKEN}": found.token})
        if not mine:
            parameters = {"Domain": "vpc", **tag_parameters("elastic-ip", tags)}
            answer = driver.ask("AllocateAddress", **parameters)
            id, holder = text(answer, "allocationId"), ""
        else:
            id, holder = mine[0].id, mine[0].instance_id
    else:
        id, holder = found.wanted_address, ""
    if holder != found.id:
        driver.ask("AssociateAddress", InstanceId=found.id, AllocationId=id)


def _thd_release_of(driver: Driver, token: str) -> None:
    """Release the addresses that were made for an instance."""
    for address in _thd_elastic(driver, {f"tag:{TOKEN}": token}):
        _thd_release_address(driver, address.id, address.association_id)


def _thd_release_address(driver: Driver, id: str, association_id: str = "") -> None:
    if association_id:
        _ignoring_missing(driver, "DisassociateAddress", AssociationId=association_id)
    _ignoring_missing(driver, "ReleaseAddress", AllocationId=id)


def _thd_leftovers(driver: Driver, cluster: str, node: str) -> list[Leftover]:
    """Addresses and disks of ours that no instance uses."""
    ours = {f"tag:{CLUSTER}": cluster, f"tag:{NODE}": node}
    found = [
        Leftover(one.id, "address", one.token)
        for one in _thd_elastic(driver, ours)
        if not one.instance_id and not one.association_id
    ]
    answer = driver.ask("DescribeVolumes", **filter_parameters({**ours, "status": "available"}))
    found += [
        Leftover(text(each, "volumeId"), "disk", _tag(each, TOKEN))
        for each in items(answer, "volumeSet/item")
    ]
    return found


def _thd_release(driver: Driver, leftover: Leftover) -> None:
    """Give one back; it may be gone."""
    if leftover.kind == "address":
        _thd_release_address(driver, leftover.id)
    else:
        _ignoring_missing(driver, "DeleteVolume", VolumeId=leftover.id)


def _ignoring_missing(driver: Driver, action: str, **parameters: str) -> None:
    from infranetes.providers.cloud.aws.errors import judge

    try:
        driver.ask(action, **parameters)
    except Exception as error:
        found = error if isinstance(error, CloudError) else judge(error)
        if found is None or found.trouble is not Trouble.MISSING:
            raise


def _tag(element: Any, key: str) -> str:
    for tag in _tags(element):
        if text(tag, "key") == key:
            return text(tag, "value")
    return ""


def _tags(element: Any) -> Iterator[Any]:
    yield from items(element, "tagSet/item")
