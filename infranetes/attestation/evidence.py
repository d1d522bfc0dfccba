# SPDX-License-Identifier: Apache-2.0
"""What is known of a confidential VM, for who judges it."""

from __future__ import annotations

import attrs


@attrs.frozen
class Evidence:
    """What is known of a pod's VM.

    :ivar technology: `Confidential`'s value. :ivar auxiliary: what came with the report.
    :ivar nonce: that the report is bound to, together with the key: see `attestation.binding`.
    :ivar key: of the certificate of the VM's agent, `authority.key_id`."""

    technology: str
    report: bytes
    auxiliary: bytes
    nonce: bytes
    key: str
    measurement: str
    namespace: str
    pod: str
    uid: str
    provider: str
    instance: str
