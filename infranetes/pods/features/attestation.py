# SPDX-License-Identifier: Apache-2.0
"""Attestation of confidential VMs as a feature: a pod gets nothing secret before its VM's processor has
vouched for the VM.

step                              what it shows
the VM makes a key                the first one came by user-data, which others may read
the processor's report            it is of this call, of this VM, and of that key: `attestation.binding`
the verdict, if there is a judge  the processor made it, and what it measured is what is expected
it is remembered                  from now on no key is accepted that was certified before: `VouchedKey`
the connection is made anew       whoever read the first key is not in between
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.attestation.evidence import Evidence
from infranetes.attestation.reports import PROVIDERS, claims_of
from infranetes.identity.authority import VouchedKey
from infranetes.machines.sandbox_memory import SandboxMemory
from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.records import Contents, SandboxRecord
from infranetes.providers import machine_annotations
from infranetes.providers.annotations import PREFIX, confidential
from infranetes.providers.confidential import Confidential
from infranetes_common.attestation import LEAST_NONCE, MOST_REPORT, binding
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotOffered
from infranetes_common.wire import cri

_log = Logger()


@attrs.frozen
class Vouched:
    """What a processor has vouched for. :ivar measurement: of what the VM was started with, hex."""

    technology: Confidential
    measurement: str
    key: VouchedKey


class Judge(Protocol):
    """Who judges reports: `infranetes.attestation.verifier.Verifier`."""

    async def judge(self, evidence: Evidence) -> None:
        """Return if a report is accepted. :raise InfranetesError: it is not, or this is not known."""


class Attestation(PodFeature):
    """Has processors vouch for the VMs of pods that ask for a confidential one.

    :param handler_of: returns the handler of a sandbox's record.
    :param judge: None: reports are kept, and a VM that can make none is taken all the same."""

    name = "attestations"

    def __init__(
        self,
        clock: IReactorTime,
        handler_of: Callable[[SandboxRecord], Handler],
        memory: SandboxMemory[Vouched],
        judge: Judge | None,
    ) -> None:
        self._clock = clock
        self._handler_of = handler_of
        self._memory = memory
        self._judge = judge
        self._vouched: dict[str, Vouched] = {}  # by sandbox

    def key(self, sandbox_id: str) -> VouchedKey | None:
        """Return the key for which a processor has vouched; None: there is none."""
        vouched = self._vouched.get(sandbox_id)
        return None if vouched is None else vouched.key

    def check(self, handler: Handler, config: cri.PodSandboxConfig) -> None:
        """Refuse guests that can't be asked, if there is a judge."""
        annotations = handler.vm_annotations(config.annotations)
        if self._judge is None or confidential(annotations) is None or handler.kind != MACHINE:
            return
        if machine_annotations.without_agent(machine_annotations.read(annotations).guest):
            raise InvalidArgument(
                f"annotation {PREFIX}confidential: this node has every confidential VM judged, and a guest "
                f"without our agent can make no report: leave it or {PREFIX}guest out"
            )

    async def answered(self, sandbox: Sandbox) -> None:
        annotations = self._handler_of(sandbox.record).vm_annotations(sandbox.config.annotations)
        technology = confidential(annotations)
        if technology is None:
            return
        with sandbox.timeline.step("the processor vouches for the VM"):
            vouched = await self._vouch(sandbox, technology)
        if vouched is None:
            return
        self._vouched[sandbox.id] = vouched  # first, so that it is forgotten if it can't be saved
        await self._memory.save(sandbox.id, vouched)
        client = sandbox.machine.connect()
        client.reconnect()
        await client.info()
        sandbox.timeline.note("the VM is confidential", f"{technology.value} {vouched.measurement}")

    async def _vouch(self, sandbox: Sandbox, technology: Confidential) -> Vouched | None:
        """Return what the processor vouches for; None: it can't be asked, and nobody wants to know.

        :raise InfranetesError: it vouches for something else, or is not believed."""
        machine = sandbox.machine
        nonce = secrets.token_bytes(LEAST_NONCE)
        try:
            await machine.renew_certificate()
            vouched = VouchedKey(sandbox.record.certificate_key, self._clock.seconds())
            made = await machine.connect().attest(nonce)
        except (FailedPrecondition, NotOffered) as error:
            if self._judge is not None:
                raise
            _log.info("sandbox {sandbox} has no report on its VM: {error}", sandbox=sandbox.id, error=error)
            return None
        if (
            max(len(made.report), len(made.auxiliary)) > MOST_REPORT
            or PROVIDERS.get(made.provider) != technology
        ):
            raise FailedPrecondition(f"the VM's agent gives no report of {technology.value}")
        claims = claims_of(technology, made.report)
        if claims.bound != binding(nonce, vouched.id):
            raise FailedPrecondition("the report is of another VM, or of another call")
        if claims.debug:
            raise FailedPrecondition("the report says that the VM is for debugging: its memory may be read")
        if self._judge is not None:
            metadata, record = sandbox.config.metadata, sandbox.record
            evidence = Evidence(
                technology=technology.value,
                report=made.report,
                auxiliary=made.auxiliary,
                nonce=nonce,
                key=vouched.id,
                measurement=claims.measurement,
                namespace=metadata.namespace,
                pod=metadata.name,
                uid=metadata.uid,
                provider=record.provider,
                instance=record.instance_id,
            )
            await self._judge.judge(evidence)
        return Vouched(technology, claims.measurement, vouched)

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        if self._vouched.pop(sandbox.id, None) is not None:
            await self._memory.forget(sandbox.id)

    async def load(self, contents: Contents) -> None:
        """Know the keys before any agent is called."""
        await self._memory.keep_only(each.id for each in contents.sandboxes)
        self._vouched = await self._memory.load_all()
