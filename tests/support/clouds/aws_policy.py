# SPDX-License-Identifier: Apache-2.0
"""Evaluates the policy that the manual offers (source: Service Authorization Reference, "Actions,
resources, and condition keys for Amazon EC2").

A call has to be allowed for each resource that it is about, by a statement with the action and the resource's
type whose conditions hold for the tags that the resource has or is to get.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs

_MANUAL = Path(__file__).resolve().parents[3] / "docs"
POLICY = _MANUAL / "provider-aws-policy.json"
PUBLISHER = _MANUAL / "publish-aws-policy.json"
_RESOURCES = re.compile(r"(Volume|Snapshot|Instance|Allocation|Association)Id(\.\d+)?")
_TAG = re.compile(r"((TagSpecification\.\d+)\.Tag\.\d+)\.Key")
_TYPES = {
    "Volume": "volume",
    "Snapshot": "snapshot",
    "Instance": "instance",
    "Allocation": "elastic-ip",
    "Association": "elastic-ip",
}
# The resources that each call makes, and the existing ones that it uses.
_MAKES = {
    "CreateVolume": ("volume",),
    "CreateSnapshot": ("snapshot",),
    "RunInstances": ("instance", "volume", "network-interface"),
    "AllocateAddress": ("elastic-ip",),
    "RegisterImage": ("image",),
}
_USES = {"RunInstances": ("image", "security-group", "subnet"), "RegisterImage": ("snapshot",)}
_SPOT = "InstanceMarketOptions.MarketType"  # a parameter of RunInstances that makes a spot request besides
_IMAGES = {"DeregisterImage": "ImageId", "CreateTags": "ResourceId.1"}  # the parameter that names the image


@attrs.frozen
class Resource:
    """A resource that a call is about. :ivar tags: its tags; None: it does not exist yet."""

    type: str
    id: str = "*"
    tags: Mapping[str, str] | None = None


@lru_cache
def statements(cluster: str, policy: Path = POLICY) -> list[Any]:
    """Return the policy's statements, for a cluster."""
    found: list[Any] = json.loads(policy.read_text().replace("CLUSTER", cluster))["Statement"]
    return found


def resources(call: Mapping[str, str], tags: Mapping[str, Mapping[str, str]]) -> list[Resource]:
    """Return the resources that a call is about. :param tags: the tags of resources, by their ids."""
    action = call["Action"]
    if action.startswith("Describe"):
        return [Resource("*")]
    found = [Resource(type) for type in (*_MAKES.get(action, ()), *_USES.get(action, ()))]
    if action == "RunInstances" and _SPOT in call:
        found.append(Resource("spot-instances-request"))
    for key, value in call.items():
        if match := _RESOURCES.fullmatch(key):
            found.append(Resource(_TYPES[match[1]], value, tags.get(value, {})))
    image = call.get(_IMAGES.get(action, ""), "")
    if image.startswith("ami-"):
        found.append(Resource("image", image, tags.get(image, {})))
    return found or [Resource("*")]


def ids(call: Mapping[str, str]) -> list[str]:
    """Return the ids of the resources with tags that a call names."""
    return [each.id for each in resources(call, {}) if each.tags is not None]


def refused(
    call: Mapping[str, str], cluster: str, tags: Mapping[str, Mapping[str, str]], policy: Path = POLICY
) -> str | None:
    """Return why a call is not allowed; None: it is."""
    action, allowing = call["Action"], statements(cluster, policy)
    for resource in resources(call, tags):
        if not any(_allows(each, call, action, resource) for each in allowing):
            return f"{action} is not allowed for {resource.type} {resource.id}"
    if asked_tags(call) and action in _MAKES:
        tagging = {**call, "ec2:CreateAction": action}
        if not any(_allows(each, tagging, "CreateTags", Resource("*")) for each in allowing):
            return f"CreateTags is not allowed with {action}"
    return None


def _allows(statement: Any, call: Mapping[str, str], action: str, resource: Resource) -> bool:
    actions, arns = _several(statement["Action"]), _several(statement["Resource"])
    account = "" if resource.type in ("image", "snapshot") else "account"
    arn = f"arn:aws-cn:ec2:region:{account}:{resource.type}/{resource.id}"
    matches = any(fnmatchcase(arn, each) or each == "*" for each in arns)
    conditions = statement.get("Condition", {}).get("StringEquals", {})
    return (
        f"ec2:{action}" in actions
        and matches
        and all(_value(key, call, resource) in _several(wanted) for key, wanted in conditions.items())
    )


def _value(key: str, call: Mapping[str, str], resource: Resource) -> str | None:
    kind, _, tag = key.partition("/")
    if kind == "aws:RequestTag":
        return asked_tags(call, resource.type).get(tag)
    if kind == "aws:ResourceTag":
        return (resource.tags or {}).get(tag)
    return call.get(key)


def asked_tags(call: Mapping[str, str], type: str = "") -> dict[str, str]:
    """Return the tags for the resources that a call makes. :param type: the resource's type; "": any."""
    found = [(value, _TAG.fullmatch(key)) for key, value in call.items()]
    return {
        value: call[f"{match[1]}.Value"]
        for value, match in found
        if match and type in ("", call.get(f"{match[2]}.ResourceType"))
    }


def _several(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
