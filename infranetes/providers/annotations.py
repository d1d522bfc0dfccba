# SPDX-License-Identifier: Apache-2.0
"""The annotations by which a pod asks for more than the CRI can say, the same for all providers.

A pod is refused, before anything is made for it, if it has an unknown annotation below `infranetes.io/` or a
malformed value. Its provider refuses the annotations that it does not serve. The names of the Go
version are aliases. A test compares the table in docs/annotations.md with this one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Mapping
from difflib import get_close_matches
from typing import Any

import attrs

from infranetes_common.errors import InvalidArgument
from infranetes_common.quantities import Needs, thousandths, units

PREFIX = "infranetes.io/"
CONTAINERS = "containers"  # names the one of CONTAINER_PROVIDERS that runs the pod's containers
CONTAINER_PROVIDERS = ("docker", "oci")
MOST_CPU_MILLIS = 1024 * 1000
LEAST_MEMORY, MOST_MEMORY = 1 << 20, 64 << 40  # bytes; a smaller number most likely lacks its unit
_MAX_VALUE = 4096


@attrs.frozen
class Wishes:
    """The requests in a pod's annotations; a field's default means that the pod does not ask."""

    image: str = ""
    instance_type: str = ""
    gpus: int = 0
    spot: bool = False
    spot_fallback: bool = False
    spot_max_price: float | None = None
    region: str = ""
    subnet: str = ""
    security_groups: tuple[str, ...] = ()
    public_address: bool | None = None
    elastic_address: str = ""  # "new", or the id of an address
    instance_profile: str = ""
    set_hostname: bool = True
    disk: int = 0  # bytes

    def refuse_others(self, provider: str, served: Container[str]) -> None:
        """Refuse what this provider does not serve.

        :param served: names of this class's fields.
        :raise InvalidArgument: the pod asks for another field; the message names the annotation.
        """
        for field in attrs.fields(Wishes):
            if field.name not in served and getattr(self, field.name) not in (field.default, False):
                name = next(row.name for row in TABLE if row.field == field.name)
                raise InvalidArgument(
                    f"annotation {PREFIX}{name} can't be served: {provider} has nothing like it; "
                    "leave it out, or have the pod scheduled to other nodes"
                )


@attrs.frozen
class Annotation:
    """An annotation: one row of the table."""

    name: str  # without the prefix
    field: str  # the field of Wishes that it sets; "": only checked here, and used elsewhere
    parse: Callable[[str], object]
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


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,6})(Mi|Gi|Ti)", text)
    if found is None or not int(found[1]):
        raise ValueError(text)
    return int(found[1]) << {"Mi": 20, "Gi": 30, "Ti": 40}[found[2]]


def _cpu(text: str) -> int:
    millis = thousandths(text)
    if not 0 < millis <= MOST_CPU_MILLIS:
        raise ValueError(text)
    return millis


def _memory(text: str) -> int:
    size = units(text)
    if not LEAST_MEMORY <= size <= MOST_MEMORY:
        raise ValueError(text)
    return size


_WORD = r"[A-Za-z0-9][A-Za-z0-9._/:@+=-]{0,254}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(_matching(_WORD)(each.strip()) for each in text.split(","))


CPU = Annotation("cpu", "", _cpu, "a number of processors such as 2 or 500m, up to 1024")
MEMORY = Annotation("memory", "", _memory, "a size from 1Mi to 64Ti, such as 8Gi")
NETWORKS = ("vpc", "overlay")
NETWORK = Annotation("network", "", _matching("|".join(NETWORKS)), " or ".join(NETWORKS))
SERVICE_PROXY = Annotation("service-proxy", "", _bool, "true or false", ("infranetes.startproxy",))
TABLE = (
    Annotation("image", "image", _matching(_WORD), "a machine image's id", ("infranetes.aws.image",)),
    Annotation(
        "instance-type",
        "instance_type",
        _matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"),
        "a type's name",
        ("infranetes.aws.instancetype",),
    ),
    CPU,
    MEMORY,
    Annotation("gpus", "gpus", _gpus, "a number of GPUs"),
    Annotation("spot", "spot", _bool, "true or false"),
    Annotation("spot-fallback", "spot_fallback", _bool, "true or false"),
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
    Annotation(CONTAINERS, "", _matching("|".join(CONTAINER_PROVIDERS)), " or ".join(CONTAINER_PROVIDERS)),
    Annotation("disk", "disk", _bytes, "a size such as 40Gi"),
    Annotation("metadata-access", "", _matching("allow|deny"), "allow or deny"),
    Annotation("set-hostname", "set_hostname", _bool, "true or false", ("infranetes.sethostname",)),
    NETWORK,
    SERVICE_PROXY,
    Annotation("network-interface", "", _bool, "true or false", ("infranetes.createinterface",)),
    Annotation("shared-paths", "", _matching(r"[^\0]*"), "paths", ("infranetes.sharedpaths",)),
)

# kubelet copies a pod's annotations to ImageSpec.annotations, for which these are meant, so they are valid on
# pods.
_OF_IMAGES = ("executable-url", "executable-sha256")


def read(annotations: Mapping[str, str]) -> Wishes:
    """Parse a pod's annotations.

    :raise InvalidArgument: a malformed value, an unknown name, or a name and its alias with different
        values. The message names the annotation.
    """
    known = {row.name for row in TABLE} | set(_OF_IMAGES)
    for name in annotations:
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in known:
            raise InvalidArgument(
                f"annotation {name[:80]} is not known; those below {PREFIX} are {', '.join(sorted(known))}"
            )
    found: dict[str, Any] = {}  # Any: each field has its own type
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


def refuse_unknown(provider: str, annotations: Mapping[str, str], supported: Collection[str] = ()) -> None:
    """Refuse what begins with a provider's own prefix, today's or the Go version's, and is not known.

    :param supported: the provider's own annotations, whole names.
    :raise InvalidArgument: the message names the annotation, and what may be meant."""
    prefixes = (f"{provider}.{PREFIX}", f"infranetes.{provider}.")
    names = [*supported, *(name for row in TABLE for name in row.aliases if name.startswith(prefixes))]
    for name in annotations:
        if name.startswith(prefixes) and name not in names:
            close = get_close_matches(name, names, n=1)
            meant = (
                f"; did you mean {close[0]}?" if close else f"; known are {', '.join(names)}" if names else ""
            )
            raise InvalidArgument(f"annotation {name[:80]} is not known to the provider {provider}{meant}")


def refuse(problems: Mapping[str, str]) -> None:
    """Refuse a pod whose annotations have problems. :param problems: by names without the prefix; "": none.

    :raise InvalidArgument: the message has the first problem."""
    for name, problem in problems.items():
        if problem:
            raise InvalidArgument(f"annotation {PREFIX}{name}: {problem}")


def wants_service_proxy(annotations: Mapping[str, str]) -> bool:
    """Return whether a pod reaches Services by its VM's own rules. `read` has accepted the annotations."""
    names = (PREFIX + SERVICE_PROXY.name, *SERVICE_PROXY.aliases)
    return all(_bool(annotations[name].strip()) for name in names if name in annotations)


def wants_spot(annotations: Mapping[str, str]) -> bool:
    """Return whether a pod with these annotations, which `read` accepts, asks for a spot instance."""
    return _bool(annotations.get(PREFIX + "spot", "false").strip())


def requests(annotations: Mapping[str, str]) -> Needs:
    """Return what a pod requests for all of its containers together.

    :raise InvalidArgument: the annotation is malformed.
    """
    cpu, memory = (
        _value(row, PREFIX + row.name, annotations[PREFIX + row.name])
        if PREFIX + row.name in annotations
        else 0
        for row in (CPU, MEMORY)
    )
    assert isinstance(cpu, int) and isinstance(memory, int)
    return Needs(cpu, memory)


def network(annotations: Mapping[str, str]) -> str:
    """Return which of NETWORKS a pod asks for; "": none. :raise InvalidArgument: it asks for another."""
    text = annotations.get(PREFIX + NETWORK.name)
    return "" if text is None else str(_value(NETWORK, PREFIX + NETWORK.name, text))


def _value(row: Annotation, name: str, text: str) -> object:
    try:
        if len(text) > _MAX_VALUE:
            raise ValueError
        return row.parse(text.strip())
    except (ValueError, KeyError):
        raise InvalidArgument(f"annotation {name}: {text[:80]!r}: expected {row.expected}") from None
