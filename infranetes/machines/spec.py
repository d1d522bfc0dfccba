# SPDX-License-Identifier: Apache-2.0
"""What a provider is asked for: the VM of a request, with its identity and its first certificate."""

from __future__ import annotations

import secrets

from infranetes.identity.certificates import Signed
from infranetes.machines.context import MachineContext, VmFacts
from infranetes.providers.interface import IGivesIdentityPrivately, InstanceSpec, VmRequest
from infranetes_common.identity import Identity

ENTROPY_BYTES = 64  # for the kernel of a clone, which begins with its template's entropy
LAUNCH_CERTIFICATE_SECONDS = 3600.0  # added to a launch's time limit, to replace the certificate


def first_certificate(context: MachineContext, id: str, *, brief: bool = False) -> Signed:
    """Sign the certificate that a VM is launched with.

    :param brief: it is of use only until the VM's agent has answered."""
    lifetime = context.times.certificate
    if brief:
        return context.authority.issue(id, min(context.times.launch, lifetime))
    if not IGivesIdentityPrivately.providedBy(context.provider):
        lifetime = min(context.times.launch + LAUNCH_CERTIFICATE_SECONDS, lifetime)
    return context.authority.issue(id, lifetime)


def instance_spec(
    context: MachineContext, facts: VmFacts, request: VmRequest, signed: Signed
) -> InstanceSpec:
    """Return the VM that is to be made. :param signed: its first certificate."""
    identity = Identity(
        sandbox_id=facts.id,
        certificate_pem=signed.certificate_pem,
        key_pem=signed.key_pem,
        ca_pem=context.authority.ca_pem,
        hostname=request.hostname,
        machine_id=facts.id,
        entropy=secrets.token_hex(ENTROPY_BYTES),
        now_nanos=context.now(),
    )
    return InstanceSpec(facts.token, facts.id, context.names.cluster, context.names.node, identity, request)
