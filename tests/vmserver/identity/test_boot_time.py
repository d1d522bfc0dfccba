# SPDX-License-Identifier: Apache-2.0
"""The clock of a machine that takes on an identity that the node wrote before the machine booted."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import attrs
from OpenSSL import SSL
from twisted.internet import reactor as _reactor
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from infranetes_common.errors import FailedPrecondition
from infranetes_common.identity import Identity, encode, encode_clock
from tests.support.clouds.imds import Imds
from tests.support.waiting import until
from tests.vmserver.fake_clock import SECOND, FakeClock
from tests.vmserver.harness import SANDBOX, run_directory
from tests.vmserver.pki import Authority
from vmserver.identity.apply import IdentityApplier
from vmserver.identity.current import CurrentIdentity
from vmserver.identity.metadata import CloudIdentity, MetadataGate
from vmserver.machine.clock import MachineClock

reactor: Any = _reactor
LAUNCH = 1_800_000_000 * SECOND  # when the node wrote the identity
BOOT_SECONDS = 45  # of an instance of a cloud


class _Listener:
    port = 2475

    def check(self, identity: Identity) -> None:
        """Need no context."""

    async def open(self, identity: Identity, context: SSL.Context | None) -> None:
        """Don't listen."""


class _Attribute(Resource):
    """Compute Engine's metadata service."""

    isLeaf = True

    def __init__(self, document: bytes) -> None:
        super().__init__()
        self._document = document

    def render_GET(self, request: Any) -> bytes:
        return self._document


class MachineTestCase(TestCase):
    def setUp(self) -> None:
        self.document = encode(attrs.evolve(Authority().identity(SANDBOX), now_nanos=LAUNCH))

    def machine(self, nanos: int) -> tuple[CurrentIdentity, FakeClock]:
        """Return a just booted machine's `CurrentIdentity`, and the machine's clock."""
        directory: Path = run_directory(self)
        clock, listener = FakeClock(nanos), _Listener()
        applier = IdentityApplier(directory, clock=MachineClock(clock))
        gate: Any = MetadataGate(reactor, guarded=False)
        return CurrentIdentity(reactor, directory, applier, gate, listener), clock  # type: ignore[arg-type]


class KeptIdentityTests(MachineTestCase):
    """The identity waits in the cloud while the machine boots."""

    async def booted(self, source: str, nanos: int) -> FakeClock:
        """Boot a machine whose own clock shows `nanos` then. Return its clock once it has its identity."""
        current, clock = self.machine(nanos)
        endpoint = ""
        if source != "vsphere":
            resource = Imds({"127.0.0.1": self.document}) if source == "aws" else _Attribute(self.document)
            port = reactor.listenTCP(0, Site(resource, timeout=None), interface="127.0.0.1")
            self.addCleanup(port.stopListening)
            endpoint = f"http://127.0.0.1:{port.getHost().port}"

        async def vmtoolsd(command: list[str], stdin: bytes) -> bytes:
            return base64.b64encode(self.document)

        waiting = lambda: not current.sandbox_id  # noqa: E731
        identity = CloudIdentity(reactor, source, endpoint, current.accept, waiting, vmtoolsd)
        identity.start()
        self.addCleanup(identity.stop)
        await until(lambda: not waiting(), "the machine has its identity")
        return clock

    async def test_its_clock_is_not_set_back_by_the_time_that_it_booted(self) -> None:
        for source in ("aws", "gcp", "openstack", "vsphere"):
            clock = await self.booted(source, LAUNCH + BOOT_SECONDS * SECOND)
            self.assertEqual(clock.now(), LAUNCH + BOOT_SECONDS * SECOND, source)
            self.assertEqual(clock.settings, [])

    async def test_nor_by_a_reboot_days_later(self) -> None:
        later = LAUNCH + 2 * 86400 * SECOND
        clock = await self.booted("aws", later)
        self.assertEqual((clock.now(), clock.settings), (later, []))

    async def test_a_clock_that_says_a_time_before_the_launch_is_set_to_that(self) -> None:
        clock = await self.booted("aws", LAUNCH - 3600 * SECOND)
        self.assertEqual(clock.settings, [LAUNCH])


class LiveIdentityTests(MachineTestCase):
    """The node sends the identity, and a line with the time right after it."""

    async def test_a_clone_has_the_nodes_time_though_its_memory_is_old(self) -> None:
        current, clock = self.machine(LAUNCH - 86400 * SECOND)
        await current.accept(self.document, live=True)
        await current.accept(encode_clock(LAUNCH + SECOND), live=True)
        self.assertEqual(clock.settings, [LAUNCH, LAUNCH + SECOND])

    async def test_a_clone_of_a_template_that_was_ahead_is_set_before_it_is_a_pods(self) -> None:
        current, clock = self.machine(LAUNCH + 86400 * SECOND)
        await current.accept(self.document, live=True)
        self.assertEqual(clock.settings, [LAUNCH])

    async def test_nothing_sets_it_back_once_it_is_a_pods(self) -> None:
        current, clock = self.machine(LAUNCH)
        await current.accept(self.document, live=True)
        clock.pass_time(100)
        await current.accept(encode_clock(LAUNCH + SECOND), live=True)
        await current.accept(self.document, live=True)
        self.assertEqual((clock.now(), clock.settings), (LAUNCH + 100 * SECOND, []))

    async def test_an_agent_that_starts_anew_leaves_the_clock_alone(self) -> None:
        current, _ = self.machine(LAUNCH)
        await current.accept(self.document, live=True)
        again, clock = self.machine(LAUNCH - SECOND)
        again._file = current._file
        await again.restore()
        self.assertEqual((again.sandbox_id, clock.settings), (SANDBOX, []))

    async def test_a_clock_that_can_not_be_set_is_told(self) -> None:
        current, clock = self.machine(LAUNCH - 3600 * SECOND)
        clock.refuses = True
        with self.assertRaisesRegex(FailedPrecondition, "CAP_SYS_TIME"):
            await current.accept(self.document)
