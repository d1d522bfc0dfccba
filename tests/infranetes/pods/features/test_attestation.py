# SPDX-License-Identifier: Apache-2.0
"""A pod that asks for a confidential VM gets nothing secret before the VM's processor has vouched for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from infranetes.attestation.evidence import Evidence
from infranetes.identity.authority import VouchedKey
from infranetes.machines import sandbox_memory
from infranetes.machines.sandbox_memory import SandboxMemory
from infranetes.pods.features.attestation import Attestation, Vouched
from infranetes.pods.node.hooks import PodFeature
from infranetes.providers.confidential import Confidential
from infranetes_common.attestation import MOST_REPORT, binding
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotOffered,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.wire import cri, vmserver
from tests.infranetes.attestation.made_reports import MEASUREMENT, snp_report
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.support.inline_threads import InlineThreads

Attests = Callable[[FakeAgent, bytes], vmserver.AttestResponse]


class _Judge:
    """Judges as it is told to.

    :ivar asked: about what. :ivar thinks: what a verdict waits for; None: nothing."""

    def __init__(self) -> None:
        self.asked: list[Evidence] = []
        self.error: Exception | None = None
        self.thinks: Deferred[None] | None = None

    async def judge(self, evidence: Evidence) -> None:
        self.asked.append(evidence)
        if self.thinks is not None:
            await self.thinks
        if self.error is not None:
            raise self.error


def good(agent: FakeAgent, nonce: bytes) -> vmserver.AttestResponse:
    """Report as the processor of a VM does whose agent has the certificate that it was last given."""
    report = snp_report(binding(nonce, key_of(agent)))
    return vmserver.AttestResponse(provider="sev_guest", report=report, auxiliary=b"chain")


def key_of(agent: FakeAgent) -> str:
    """Return the key of an agent's certificate, as `FakeAuthority` numbers it."""
    return f"key {agent.certificates[-1].split()[1]}"


class _World(FakeNode):
    """:ivar judge: None: there is none. :ivar attests: how VMs report."""

    def __init__(self, directory: Path) -> None:
        self.memory = SandboxMemory(InlineThreads().reactor, directory, Vouched)
        self.judge: _Judge | None = _Judge()
        self.attests: Attests = good
        super().__init__()

    def make_agent(self, sandbox_id: str) -> FakeAgent:
        agent = super().make_agent(sandbox_id)
        agent.attests = lambda nonce: self.attests(agent, nonce)
        return agent

    def make_features(self) -> list[PodFeature]:
        clock = cast(IReactorTime, self.daemon_clock)
        self.feature = Attestation(clock, self.node.handlers.of, self.memory, self.judge)
        return [*super().make_features(), self.feature]


def confidential(value: str = "sev-snp") -> cri.PodSandboxConfig:
    config: cri.PodSandboxConfig = pod(annotations={"infranetes.io/confidential": value})
    return config


class AttestationTests(PodsTestCase):
    def make_world(self) -> FakeNode:
        self.directory = Path(self.mktemp())
        self.node = _World(self.directory)
        return self.node

    def refused(self, error: type[Exception] = FailedPrecondition) -> str:
        """Ask for a pod that is refused; return why. Its VM is gone."""
        words = str(self.failureResultOf(self.start(confidential()), error).value)
        self.assertNothingLeft()
        self.assertEqual(self.do(self.node.memory.load_all()), {})
        return words

    @property
    def judge(self) -> _Judge:
        assert self.node.judge is not None
        return self.node.judge

    def test_others_are_not_asked(self) -> None:
        id = self.run_pod()
        self.assertEqual((self.node.agents[id].certificates, self.judge.asked), ([], []))
        self.assertIsNone(self.node.feature.key(id))

    def test_the_judge_has_all_that_the_report_is_bound_to(self) -> None:
        id = self.run_pod(confidential())
        [evidence], record = self.judge.asked, self.record(id)
        self.assertEqual(evidence.key, record.certificate_key)
        self.assertEqual(evidence.report, snp_report(binding(evidence.nonce, evidence.key)))
        self.assertEqual((evidence.technology, evidence.measurement), ("sev-snp", MEASUREMENT.hex()))
        self.assertEqual((evidence.pod, evidence.instance), ("web", record.instance_id))
        self.assertEqual(evidence.auxiliary, b"chain")

    def test_no_two_pods_have_one_nonce(self) -> None:
        for name in ("one", "two"):
            self.run_pod(pod(name, annotations={"infranetes.io/confidential": "sev-snp"}))
        first, second = self.judge.asked
        self.assertNotEqual(first.nonce, second.nonce)

    def test_the_vm_has_a_new_key_and_is_called_by_a_new_connection_from_then_on(self) -> None:
        id = self.run_pod(confidential())
        agent = self.node.agents[id]
        self.assertEqual((len(agent.certificates), agent.reconnected), (1, 1))
        self.assertEqual(self.node.feature.key(id), VouchedKey(key_of(agent), self.node.clock.seconds()))

    def test_the_key_is_known_before_the_connection_is_made_anew(self) -> None:
        known: list[VouchedKey | None] = []
        self.patch(
            FakeAgent, "reconnect", lambda agent: known.append(self.node.feature.key(agent.sandbox_id))
        )
        self.run_pod(confidential())
        self.assertIsInstance(known[0], VouchedKey)

    def test_an_agent_that_does_not_answer_by_the_new_connection_is_not_the_vms(self) -> None:
        def gone(agent: FakeAgent) -> None:
            agent.away = True

        self.patch(FakeAgent, "reconnect", gone)
        self.failureResultOf(self.start(confidential()), Unavailable)
        self.assertNothingLeft()

    def test_what_does_not_vouch_for_the_vm(self) -> None:
        def other_key(agent: FakeAgent, nonce: bytes) -> vmserver.AttestResponse:
            return vmserver.AttestResponse(provider="sev_guest", report=snp_report(binding(nonce, "key 0")))

        def other_call(agent: FakeAgent, nonce: bytes) -> vmserver.AttestResponse:
            return good(agent, nonce[::-1])

        def debugged(agent: FakeAgent, nonce: bytes) -> vmserver.AttestResponse:
            report = snp_report(binding(nonce, key_of(agent)), policy=1 << 19)
            return vmserver.AttestResponse(provider="sev_guest", report=report)

        def other_technology(agent: FakeAgent, nonce: bytes) -> vmserver.AttestResponse:
            answer = good(agent, nonce)
            answer.provider = "tdx_guest"
            return answer

        def too_long(agent: FakeAgent, nonce: bytes) -> vmserver.AttestResponse:
            answer = good(agent, nonce)
            answer.auxiliary = bytes(MOST_REPORT + 1)
            return answer

        def nothing(agent: FakeAgent, nonce: bytes) -> vmserver.AttestResponse:
            return vmserver.AttestResponse()

        for attests, words in (
            (other_key, "of another VM, or of another call"),
            (other_call, "of another VM, or of another call"),
            (debugged, "for debugging"),
            (other_technology, "no report of sev-snp"),
            (too_long, "no report of sev-snp"),
            (nothing, "no report of sev-snp"),
        ):
            self.node.attests = attests
            self.assertIn(words, self.refused())
        self.assertEqual(self.judge.asked, [])

    def test_a_report_that_the_judge_does_not_accept(self) -> None:
        for error in (FailedPrecondition("the measurement is not known"), Unavailable("nobody answers")):
            self.judge.error = error
            self.assertIn(str(error), self.refused(type(error)))

    def test_a_vm_that_can_make_no_report_is_taken_where_nobody_judges(self) -> None:
        def lacks(agent: FakeAgent, nonce: bytes) -> vmserver.AttestResponse:
            raise NotOffered("its guest image is of an earlier release")

        self.node.attests = lacks
        self.assertIn("earlier release", self.refused(NotOffered))
        self.node.kill()
        self.node.judge = None
        self.node.begin()
        self.world.provider_ready()
        id = self.run_pod(confidential())
        self.assertIsNone(self.node.feature.key(id))

    def test_a_guest_without_our_agent_is_taken_where_nobody_judges(self) -> None:
        async def lacks(agent: FakeAgent, within: float = 0) -> bytes:
            raise NotOffered("there is no agent in this VM, which makes its key")

        self.patch(FakeAgent, "new_key", lacks)
        self.assertIn("makes its key", self.refused(NotOffered))
        self.node.kill()
        self.node.judge = None
        self.node.begin()
        self.world.provider_ready()
        self.assertIsNone(self.node.feature.key(self.run_pod(confidential())))

    def test_a_pod_that_is_removed_while_it_is_judged_leaves_nothing(self) -> None:
        self.judge.thinks = Deferred()
        launch = self.start(confidential())
        self.assertNoResult(launch)
        [id] = self.node.agents
        self.do(self.world.sandboxes.stop(id))
        self.do(self.world.sandboxes.remove(id))
        self.failureResultOf(launch)
        self.assertNothingLeft()
        self.assertEqual((self.do(self.node.memory.load_all()), self.node.feature.key(id)), ({}, None))

    def test_a_pod_is_judged_again_if_the_daemon_is_killed_meanwhile(self) -> None:
        self.judge.thinks = Deferred()
        self.start(confidential()).addErrback(lambda failure: None)
        self.node.kill()
        self.judge.thinks = None
        self.node.begin()
        self.world.provider_ready()
        first, second = self.judge.asked
        self.assertNotEqual((first.nonce, first.key), (second.nonce, second.key))
        [id] = self.node.agents
        key = self.node.feature.key(id)
        self.assertEqual(key and key.id, second.key)
        self.assertEqual(self.record(id).state.value, "ready")

    def test_what_can_not_be_remembered_is_not_known(self) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        self.patch(sandbox_memory, "replace_file", full)
        self.assertIn("No space left", self.refused(ResourceExhausted))
        [id] = self.node.agents
        self.assertIsNone(self.node.feature.key(id))

    def test_a_guest_without_our_agent_is_refused_where_somebody_judges(self) -> None:
        config = pod(annotations={"infranetes.io/confidential": "sev-snp", "infranetes.io/guest": "ssh"})
        machine = type(
            "Handler", (), {"kind": "machine", "vm_annotations": lambda _, annotations: annotations}
        )
        error = self.assertRaises(InvalidArgument, self.node.feature.check, machine(), config)
        self.assertIn("can make no report: leave it or infranetes.io/guest out", str(error))
        self.node.feature._judge = None
        self.node.feature.check(machine(), config)

    def test_the_next_daemon_knows_the_key_before_it_calls_the_agent(self) -> None:
        id = self.run_pod(confidential())
        key = self.node.feature.key(id)
        self.node.kill()
        self.node.begin()
        self.assertEqual(self.node.feature.key(id), key)

    def test_a_pod_that_is_gone_is_forgotten(self) -> None:
        id = self.run_pod(confidential())
        other = self.run_pod(pod("other", annotations=dict(confidential().annotations)))
        self.assertEqual(self.do(self.node.memory.load(id)).measurement, MEASUREMENT.hex())
        self.do(self.world.sandboxes.stop(id))
        self.assertIsNone(self.node.feature.key(id))
        self.assertEqual(list(self.do(self.node.memory.load_all())), [other])

    def test_a_malformed_annotation_is_named_before_anything_is_made(self) -> None:
        error = self.failureResultOf(self.start(confidential("sgx")), InvalidArgument)
        self.assertIn("infranetes.io/confidential: 'sgx': expected sev-snp or tdx", str(error.value))
        self.assertNothingLeft()

    def test_one_technology_is_not_the_other(self) -> None:
        self.failureResultOf(self.start(confidential("tdx")), FailedPrecondition)
        self.assertIs(Confidential("tdx"), Confidential.TDX)
