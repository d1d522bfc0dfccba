# SPDX-License-Identifier: Apache-2.0
"""The technologies by which a VM's memory is out of its hypervisor's reach."""

from __future__ import annotations

import enum


class Confidential(enum.Enum):
    """A technology of a processor."""

    SEV_SNP = "sev-snp"  # AMD's
    TDX = "tdx"  # Intel's
