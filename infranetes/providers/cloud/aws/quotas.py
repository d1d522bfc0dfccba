# SPDX-License-Identifier: Apache-2.0
"""EC2's limits of vCPUs, each for the types of some families (source: Amazon EC2 User Guide, "Amazon EC2
instance type quotas")."""

from __future__ import annotations

import re

_FAMILY = re.compile(r"[a-z]+")  # m of m5.large, inf of inf2.xlarge, u of u-6tb1.metal
# A, C, D, H, I, M, R, T and Z, and every family that begins with one of these letters, except
# those of `_OTHERS`.
_STANDARD = "Standard"
_OTHERS = {
    "dl": "DL",
    "f": "F",
    "g": "G and VT",
    "gr": "G and VT",
    "hpc": "HPC",
    "inf": "Inf",
    "mac": "Mac",
    "p": "P",
    "trn": "Trn",
    "u": "High Memory",
    "vt": "G and VT",
    "x": "X",
}


def quota_of(type: str) -> str:
    """Return the name of the limit that an instance type counts for. Spot instances have limits of their own,
    for the same types."""
    family = _FAMILY.match(type)
    return _OTHERS.get(family[0], _STANDARD) if family is not None else ""
