# SPDX-License-Identifier: Apache-2.0
"""The limits on annotations that cost money, give rights or open network access: pods may ask for nothing of
the kind unless the provider's table allows it.

The settings of a runtime handler are the administrator's own and are not limited here. Sizes, and
with them GPUs and spot instances, are limited by `sizes`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from fnmatch import fnmatchcase
from typing import assert_never

from infranetes.providers.annotations import PREFIX, TABLE, Annotation, Wishes
from infranetes.providers.cloud.settings import CloudSettings
from infranetes_common.errors import InvalidArgument

_KEYS = {  # the key of CloudSettings that limits each field of Wishes
    "image": "allowed_images",
    "subnet": "allowed_subnets",
    "security_groups": "allowed_security_groups",
    "instance_profile": "allowed_instance_profiles",
    "elastic_address": "allowed_elastic_addresses",
    "public_address": "allow_public_address",
}
_LIMITED = tuple(row for row in TABLE if row.field in _KEYS)


def check_allowed(wishes: Wishes, granted: Container[str], settings: CloudSettings, provider: str) -> None:
    """Check that a pod asks only for what it may have.

    :param granted: annotations that a handler sets, by any of their names.
    :raise InvalidArgument: it asks for more; the message names the annotation, the value and the key to
        change."""
    for row in _LIMITED:
        if not any(name in granted for name in (PREFIX + row.name, *row.aliases)):
            _check(row, getattr(wishes, row.field), getattr(settings, _KEYS[row.field]), provider)


def _check(
    row: Annotation,
    asked: bool | str | tuple[str, ...] | None,
    allowed: bool | Sequence[str],
    provider: str,
) -> None:
    key = f"providers.{provider}.{_KEYS[row.field]}"
    match asked:
        case None | False | "":
            pass
        case True:
            if not allowed:
                raise _refusal(row, "true", f"{key} = true")
        case str() | tuple():
            patterns = () if isinstance(allowed, bool) else allowed
            for value in (asked,) if isinstance(asked, str) else asked:
                if not any(fnmatchcase(value, pattern) for pattern in patterns):
                    raise _refusal(row, value, f"it in {key}")
        case _:
            assert_never(asked)


def _refusal(row: Annotation, value: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        f"annotation {PREFIX}{row.name}: {value!r} is not allowed for pods of this node; have an "
        f"administrator allow {remedy}, or leave it out"
    )
