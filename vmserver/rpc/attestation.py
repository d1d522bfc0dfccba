# SPDX-License-Identifier: Apache-2.0
"""Attest: the processor reports on this machine, and on the key of its agent."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorThreads

from infranetes_common.attestation import LEAST_NONCE, MOST_NONCE, binding
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import InvalidArgument, Unimplemented
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentAttestationRpcs
from txgrpc import Call
from vmserver.identity.current import CurrentIdentity
from vmserver.machine.reports import Reports


class AttestationCalls(AgentAttestationRpcs):
    """Answers with reports. :param reports: None: the machine is shared."""

    def __init__(self, reactor: IReactorThreads, identity: CurrentIdentity, reports: Reports | None) -> None:
        self._reactor = reactor
        self._identity = identity
        self._reports = reports

    async def Attest(self, request: messages.AttestRequest, call: Call) -> messages.AttestResponse:
        if self._reports is None:
            raise Unimplemented("the machine is not the pod's alone")
        if not LEAST_NONCE <= len(request.nonce) <= MOST_NONCE:
            raise InvalidArgument(f"nonce: {LEAST_NONCE} to {MOST_NONCE} bytes are needed")
        bound = binding(request.nonce, self._identity.key)
        made = await run_in_thread(self._reactor, self._reports._thd_of, bound)
        return messages.AttestResponse(provider=made.provider, report=made.report, auxiliary=made.auxiliary)
