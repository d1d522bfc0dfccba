# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' label selectors."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from infranetes.kubernetes.fields import Fields
from infranetes_common.errors import InvalidArgument

WITH_VALUES = ("In", "NotIn")
WITHOUT_VALUES = ("Exists", "DoesNotExist")


@attrs.frozen
class Requirement:
    """One condition on labels.

    `operator` is In, NotIn, Exists or DoesNotExist; only In and NotIn have values."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels meet the condition. A missing label is NotIn anything."""
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value is not None and value in self.values
            case "NotIn":
                return value is None or value not in self.values
            case "Exists":
                return value is not None
            case _:
                return value is None


@attrs.frozen(cache_hash=True)
class Selector:
    """A selector whose conditions must all hold. Without conditions it selects everything."""

    requirements: frozenset[Requirement] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether an object with these labels is selected."""
        for each in self.requirements:  # noqa: SIM110 - this runs a million times, and all() is slower
            if not each.holds(labels):
                return False
        return True


EVERYTHING = Selector()


def selector(fields: Fields) -> Selector:
    """Read a LabelSelector. :raise InvalidArgument: it is not a valid one."""
    found = {Requirement(key, "In", frozenset((value,))) for key, value in fields.mapping("matchLabels")}
    for each in fields.items("matchExpressions"):
        key, operator, values = each.text("key"), each.text("operator"), frozenset(each.texts("values"))
        if (
            not key
            or operator not in WITH_VALUES + WITHOUT_VALUES
            or (operator in WITH_VALUES) != bool(values)
        ):
            raise InvalidArgument(
                f"{each.what}: key {key[:100]!r} with the operator {operator[:100]!r} and "
                f"{len(values)} values is no condition"
            )
        found.add(Requirement(key, operator, values))
    return Selector(frozenset(found))
