# SPDX-License-Identifier: Apache-2.0
"""The grpc-timeout header (source: grpc/grpc doc/PROTOCOL-HTTP2.md, Timeout)."""

from __future__ import annotations

import math
import re

_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_FORM = re.compile(rb"([0-9]{1,8})([HMSmun])")
_LARGEST = 99_999_999


def decode_timeout(value: bytes) -> float:
    """Return the header's value in seconds.

    :raise ValueError: not of the form that gRPC prescribes.
    """
    matched = _FORM.fullmatch(value)
    if matched is None:
        raise ValueError("grpc-timeout is not up to 8 digits and one of HMSmun")
    return int(matched[1]) * _UNITS[matched[2].decode()]


def encode_timeout(seconds: float) -> bytes:
    """Return the header's value for `seconds`, in the finest unit that holds it, rounded up, never zero."""
    for unit, length in reversed(_UNITS.items()):
        amount = max(1, math.ceil(seconds / length))
        if amount <= _LARGEST:
            return b"%d%b" % (amount, unit.encode())
    return b"%dH" % _LARGEST
