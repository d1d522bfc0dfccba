"""What a pod may ask for by annotation: one table, the names of earlier releases as aliases.

The table in docs/annotations.md is held against this one by a test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from infranetes_common.errors import InvalidArgument

PREFIX = "infranetes.io/"
_MAX_VALUE = 4096


@attrs.frozen
class Wishes:
    """A pod's annotations, understood. Empty: not asked for."""

    image: str = ""
    instance_type: str = ""
    gpus: int = 0
    spot: bool = False
    spot_max_price: float | None = None
    region: str = ""
    subnet: str = ""
    security_groups: tuple[str, ...] = ()
    public_address: bool | None = None
    elastic_address: str = ""  # "new", or an address's id
    instance_profile: str = ""
    set_hostname: bool = True


@attrs.frozen
class Annotation:
    """One row of the table."""

    name: str  # without the prefix
    field: str  # of Wishes; "": checked here, meant for others
    parse: Callable[[str], Any]
    expected: str  # for people
    aliases: tuple[str, ...] = ()


def _bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _matching(pattern: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return parse


def _gpus(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,2}", text):
        raise ValueError(text)
    return int(text)


def _price(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(?:\.[0-9]{1,5})?", text) or not float(text):
        raise ValueError(text)
    return float(text)


_WORD = r"[A-Za-z0-9][A-Za-z0-9._/:@+=-]{0,254}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(_matching(_WORD)(each.strip()) for each in text.split(","))


TABLE = (
    Annotation("image", "image", _matching(_WORD), "a machine image's id", ("infranetes.aws.image",)),
    Annotation(
        "instance-type",
        "instance_type",
        _matching(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}"),
        "a type's name",
        ("infranetes.aws.instancetype",),
    ),
    Annotation("gpus", "gpus", _gpus, "a number of GPUs"),
    Annotation("spot", "spot", _bool, "true or false"),
    Annotation("spot-max-price", "spot_max_price", _price, "a price of an hour, such as 0.05"),
    Annotation(
        "region", "region", _matching(r"[a-z0-9-]{1,32}"), "a region's name", ("infranetes.aws.region",)
    ),
    Annotation("subnet", "subnet", _matching(_WORD), "a subnet's id", ("infranetes.aws.subnet",)),
    Annotation(
        "security-groups",
        "security_groups",
        _words,
        "ids with commas between",
        ("infranetes.aws.securitygroup", "infranetes.aws.securtiygroup"),
    ),
    Annotation("public-address", "public_address", _bool, "true or false"),
    Annotation(
        "elastic-address",
        "elastic_address",
        _matching(r"new|[a-z0-9][a-z0-9-]{0,62}"),
        'an address\'s id, or "new"',
        ("infranetes.aws.elasticip",),
    ),
    Annotation(
        "instance-profile",
        "instance_profile",
        _matching(_WORD),
        "a profile's name or ARN",
        ("infranetes.aws.iaminstancename",),
    ),
    Annotation("metadata-access", "", _matching("allow|deny"), "allow or deny"),
    Annotation("set-hostname", "set_hostname", _bool, "true or false", ("infranetes.sethostname",)),
    Annotation("service-proxy", "", _bool, "true or false", ("infranetes.startproxy",)),
    Annotation("network-interface", "", _bool, "true or false", ("infranetes.createinterface",)),
    Annotation("shared-paths", "", _matching(r"[^\0]*"), "paths", ("infranetes.sharedpaths",)),
)


def read(annotations: Mapping[str, str]) -> Wishes:
    """What a pod's annotations ask for.

    :raise InvalidArgument: a value that does not fit; names the annotation. Likewise a name and its
        alias with different values.
    """
    found: dict[str, Any] = {}
    for row in TABLE:
        given = [name for name in (PREFIX + row.name, *row.aliases) if name in annotations]
        if not given:
            continue
        values = {annotations[name] for name in given}
        if len(values) > 1:
            raise InvalidArgument(f"annotations {' and '.join(given)} differ; they mean the same: give one")
        value = _value(row, given[0], values.pop())
        if row.field:
            found[row.field] = value
    return Wishes(**found)


def _value(row: Annotation, name: str, text: str) -> Any:
    try:
        if len(text) > _MAX_VALUE:
            raise ValueError
        return row.parse(text.strip())
    except (ValueError, KeyError):
        raise InvalidArgument(f"annotation {name}: {text[:80]!r}: expected {row.expected}") from None
