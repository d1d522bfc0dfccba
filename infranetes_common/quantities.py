# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' quantities: `500m`, `1.5`, `8Gi`, `2e9`."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

import attrs

_QUANTITY = re.compile(
    r"\+?([0-9]{1,32}(?:\.[0-9]{0,32})?|\.[0-9]{1,32})(?:[eE]([+-]?[0-9]{1,2})|([A-Za-z]*))"
)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_MOST = 1 << 62


@attrs.frozen
class Needs:
    """The resources that a pod requests. 0 where it does not say."""

    cpu_millis: int = 0  # thousandths of a core
    memory_bytes: int = 0


def thousandths(text: str) -> int:
    """Return a quantity in thousandths, rounded up. :raise ValueError: it is none, or out of range."""
    return _rounded(_parsed(text) * 1000, text)


def units(text: str) -> int:
    """Return a quantity, rounded up. :raise ValueError: it is none, or out of range."""
    return _rounded(_parsed(text), text)


def _parsed(text: str) -> Decimal:
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no quantity")
    number, exponent, suffix = Decimal(found[1]), found[2], found[3] or ""
    if exponent is not None:
        return number.scaleb(int(exponent))
    if suffix in _BINARY:
        return number * (1 << _BINARY[suffix])
    if suffix in _DECIMAL:
        return number.scaleb(_DECIMAL[suffix])
    raise ValueError(f"{text[:80]!r} is no quantity")


def _rounded(number: Decimal, text: str) -> int:
    if number > _MOST:
        raise ValueError(f"{text[:80]!r} is out of range")
    return int(number.to_integral_value(ROUND_CEILING))
