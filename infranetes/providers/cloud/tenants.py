# SPDX-License-Identifier: Apache-2.0
"""The settings of a cloud's tenants: the keys of the cloud's table that each tenant has for itself.

Each cloud says by `CloudSettings.TENANT_KEYS` which these are: credentials, project, networks, rights. A
tenant takes all other keys from the cloud's table; no tenant sees another one's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import ClassVar, Protocol

import attrs

from infranetes.providers.tenants import NAMESPACES, names

NAME = r"[a-z0-9](?:[-a-z0-9]{0,30}[a-z0-9])?"
# The keys that limit what pods may ask for, which every cloud's tenants may have.
COMMON_KEYS = (
    "sizes",
    "allowed_images",
    "allowed_subnets",
    "allowed_security_groups",
    "allowed_instance_profiles",
    "allowed_elastic_addresses",
    "allow_public_address",
    "agent_address",
)
_NAMESPACE = r"[a-z0-9*?](?:[-a-z0-9*?]{0,61}[a-z0-9*?])?"


class _CloudSettings(Protocol):
    """The part of `CloudSettings`, which has tenants, that says what these consist of."""

    TENANT_KEYS: ClassVar[tuple[str, ...]]


def are_tenants(
    instance: _CloudSettings,
    attribute: attrs.Attribute[Mapping[str, Mapping[str, object]]],
    value: Mapping[str, Mapping[str, object]],
) -> None:
    """Refuse tables that are no tenants. Their values are checked with the keys that they stand for.

    :raise ValueError: says which tenant is wrong."""
    own = instance.TENANT_KEYS
    if value and not own:
        raise ValueError("this provider has no tenants")
    for name, table in value.items():
        if not re.fullmatch(NAME, name):
            raise ValueError(f"{name[:64]!r}: a tenant's name has up to 32 of a-z, 0-9 and -")
        for key in table:
            if key not in (NAMESPACES, *own, *COMMON_KEYS):
                raise ValueError(f"{name}.{key[:64]}: {_unknown(key, own)}")
        if not any(key in own for key in table):
            raise ValueError(f"{name}: it has nothing of its own; give it one of {', '.join(own)}")
        _check_namespaces(name, table.get(NAMESPACES, ()))
    listed = Counter(one for table in value.values() for one in {*names(table.get(NAMESPACES))})
    for namespace, times in listed.items():
        if times > 1:
            raise ValueError(f"{times} tenants list the namespace {namespace!r}, which can be of one only")


def _check_namespaces(tenant: str, namespaces: object) -> None:
    given: Iterable[object] = namespaces if isinstance(namespaces, list | tuple) else (None,)
    if not all(isinstance(one, str) and re.fullmatch(_NAMESPACE, one) for one in given):
        raise ValueError(f"{tenant}.{NAMESPACES}: a list of namespaces is expected, with * and ?")


def _unknown(key: str, own: Sequence[str]) -> str:
    close = get_close_matches(key, (NAMESPACES, *own, *COMMON_KEYS), n=1)
    meant = f"did you mean {close[0]}?" if close else f"known are {', '.join(own)}"
    return f"no key that a tenant has for itself; {meant}"
