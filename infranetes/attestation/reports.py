# SPDX-License-Identifier: Apache-2.0
"""What a processor's report says. That the processor made it, its signature alone shows: see `verifier`.

Sources: AMD, "SEV Secure Nested Paging Firmware ABI Specification", table ATTESTATION_REPORT; Intel, "TDX
DCAP Quoting Library API", appendix "Quote Format", versions 4 and 5.
"""

from __future__ import annotations

import struct

import attrs

from infranetes.providers.confidential import Confidential
from infranetes_common.errors import FailedPrecondition

PROVIDERS = {"sev_guest": Confidential.SEV_SNP, "tdx_guest": Confidential.TDX}  # as the guest's kernel says
_SNP_BYTES = 1184
_SNP_DEBUG = 1 << 19  # of the policy: the hypervisor may read the memory
_TDX = 0x81  # the kind of quotes on trust domains
_TDX_BODY = {4: 48, 5: 54}  # where a quote's body is, by its version
_TDX_BODY_BYTES = 584
_TDX_DEBUG = 1 << 0  # of the attributes, as above


@attrs.frozen
class Claims:
    """What a report says of a VM.

    :ivar measurement: of what it was started with, hex. :ivar bound: the 64 bytes that its guest gave.
    :ivar debug: whether the hypervisor may read its memory all the same."""

    measurement: str
    bound: bytes
    debug: bool


def claims_of(technology: Confidential, report: bytes) -> Claims:
    """Return what a report says. :raise FailedPrecondition: it is none of that technology."""
    claims = _of_snp(report) if technology is Confidential.SEV_SNP else _of_tdx(report)
    if claims is None:
        raise FailedPrecondition(f"the VM's report is none of {technology.value} that is known")
    return claims


def _of_snp(report: bytes) -> Claims | None:
    if len(report) < _SNP_BYTES:
        return None
    version, _, policy = struct.unpack_from("<IIQ", report)
    if version < 2:
        return None
    return Claims(report[0x90:0xC0].hex(), report[0x50:0x90], bool(policy & _SNP_DEBUG))


def _of_tdx(report: bytes) -> Claims | None:
    if len(report) < min(_TDX_BODY.values()) + _TDX_BODY_BYTES:
        return None
    version, _, kind = struct.unpack_from("<HHI", report)
    at = _TDX_BODY.get(version)
    if at is None or kind != _TDX or len(report) < at + _TDX_BODY_BYTES:
        return None
    body = report[at : at + _TDX_BODY_BYTES]
    (attributes,) = struct.unpack_from("<Q", body, 120)
    return Claims(body[136:184].hex(), body[520:584], bool(attributes & _TDX_DEBUG))
