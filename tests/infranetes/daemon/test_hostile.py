# SPDX-License-Identifier: Apache-2.0
"""A VM with a hostile agent beside ten with honest ones: calls about the honest ones are answered as ever.

The daemon is a process of its own; so is the hostile agent, which has the identity of its VM.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Container
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint

from infranetes.config.schema import CONTROL_SOCKET
from infranetes_common.wire import control, cri, vmserver
from infranetes_common.wire.control_rpcs import ControlStub
from tests.harness.durations import slow
from tests.harness.needs import repetitions
from tests.harness.speed import slowness
from tests.infranetes.daemon.case import reactor
from tests.support.hostile.case import HONEST, HostileCase, HostileProcess
from tests.support.hostile.corpus import responses
from txgrpc import Channel, Code, GrpcError

SECONDS = repetitions(usual=0.2, nightly=2.0)  # how long an attack lasts, at least
TURN = 0.05  # the limit for a turn of the reactor, in seconds of processor time
CALL = 0.1  # the same for an answer about an honest pod that the daemon has at hand
TRIES = 3  # how often an attack is tried; see `suffers`
MEMORY = 64  # MiB that one hostile VM may cost the daemon; without one it needs about 70
# With an answer of 16 MiB to an ExecSync on its way to kubelet; honest answers can be as large.
EXEC_MEMORY, EXEC_TURN = 128, 0.1
SHAPES = repetitions(usual=5, nightly=60)  # messages of each method, of arbitrary shapes


@slow(20, "all that reads from agents is called during each attack")
class StallTests(HostileCase):
    """The daemon does not stall, and its memory stays bounded."""

    async def suffers(
        self, liar: HostileProcess, memory: int = MEMORY, turn: float = TURN, **attacks: str
    ) -> None:
        """Check that nothing suffers from these attacks while all calls that read from agents are made.

        An attack that makes turns or calls long, or an honest VM's answer too late, does so every time, while
        delays by the machine, whose memory its host may have to fetch first, do not recur. So it counts only
        if three attacks of three show it.
        """
        long: list[str] = []
        while len(long) < TRIES:
            await self.attacked_by(liar, memory, **attacks)
            slow = slowness()
            if self.longest_turn < turn * slow and self.longest_call < CALL * slow and not self.absent:
                return
            long.append(
                f"a turn of {self.longest_turn:.3f} s, a call of {self.longest_call:.3f} s,"
                f" no figures of {self.absent or 'none'}"
            )
        self.fail(f"{'; '.join(long)} by {attacks}")

    async def attacked_by(self, liar: HostileProcess, memory: int, **attacks: str) -> None:
        """Attack for some time, then let the agent be honest again. `longest_turn` is that of this time."""
        before = self.memory()
        self.absent: set[str] = set()
        self.forget_highest_memory()
        self.forget_turns()
        await liar.attack(None, **attacks)
        asking = Deferred.fromCoroutine(self.ask_everything(attacks))
        await self.call_honest(SECONDS)
        await asking
        self.assertLess(self.memory("VmHWM") - before, memory, attacks)
        self.assertTrue(self.alive)
        await liar.attack()
        if "Watch" in attacks:
            await self.told_of_again()

    async def told_of_again(self) -> None:
        """Wait until the daemon hears from the hostile agent, which is honest at this moment."""
        while True:
            stats = await self.runtime.ListPodSandboxStats(cri.ListPodSandboxStatsRequest(), timeout=20.0)
            if self.bad in {one.attributes.id for one in stats.stats}:
                return
            await self.sleep(0.1)

    async def ask_everything(self, attacks: Container[str]) -> None:
        """Make kubelet's calls; check that each list has the honest pods.

        Those of which there are no figures are added to `absent`."""
        for _ in range(repetitions(usual=1, nightly=2)):
            stats = await self.runtime.ListPodSandboxStats(cri.ListPodSandboxStatsRequest(), timeout=20.0)
            self.absent |= set(self.pods) - {one.attributes.id for one in stats.stats}
            metrics = await self.runtime.ListPodSandboxMetrics(
                cri.ListPodSandboxMetricsRequest(), timeout=20.0
            )
            self.absent |= set(self.pods) - {one.pod_sandbox_id for one in metrics.pod_metrics}
            listed = await self.runtime.ListContainerStats(cri.ListContainerStatsRequest(), timeout=20.0)
            self.absent |= set(self.pods.values()) - {one.attributes.id for one in listed.stats}
            self.assertEqual(len(await self.sandboxes()), HONEST + 1)
            self.assertEqual(len(await self.containers()), HONEST + 1)
            for call in (
                self.runtime.ExecSync(
                    cri.ExecSyncRequest(container_id=self.victim, cmd=["x"], timeout=1), timeout=3.0
                ),
                self.runtime.ContainerStatus(
                    cri.ContainerStatusRequest(container_id=self.victim), timeout=3.0
                ),
            ):
                try:
                    await call
                except GrpcError:
                    continue
            if "Shell" in attacks:
                await self.enter()

    async def enter(self) -> None:
        """Read a shell's output in the hostile agent's VM, for a while."""
        path = str(self.root / "run" / CONTROL_SOCKET)
        channel = Channel(reactor, UNIXClientEndpoint(reactor, path))
        try:
            call = ControlStub(channel).EnterPod(timeout=1.0)
            await call.send(control.EnterPodRequest(start=control.EnterPodStart(pod=self.bad)))
            async for _ in call:
                pass
        except GrpcError as error:
            self.assertNotEqual(error.code, Code.PERMISSION_DENIED)
        finally:
            await channel.close()

    async def test_figures(self) -> None:
        liar = await self.replace_agent()
        for attack in (
            "cards",
            "containers",
            "repeated",
            "names",
            "negative",
            "text",
            "unknown",
            "huge",
            "never",
        ):
            await self.suffers(liar, Stats=attack)

    async def test_containers(self) -> None:
        liar = await self.replace_agent()
        for attack in ("ids", "snapshot", "same", "removed", "message", "words", "huge", "broken", "never"):
            await self.suffers(liar, Watch=attack)

    async def test_logs(self) -> None:
        liar = await self.replace_agent()
        for attack in ("newlines", "lines", "text", "cursors", "empty", "huge", "broken"):
            await self.suffers(liar, ReadLog=attack)

    async def test_volumes(self) -> None:
        liar = await self.replace_agent()
        for attack in ("repeated", "empty", "long", "many", "huge", "broken"):
            await self.suffers(liar, WatchVolumes="again", ListVolume=attack)
        for attack in ("pieces", "empty", "huge", "never"):
            await self.suffers(liar, WatchVolumes="again", ListVolume="file", ReadVolume=attack)

    async def test_calls(self) -> None:
        liar = await self.replace_agent()
        for attack in ("output", "huge", "never", "broken"):
            other = attack.replace("output", "huge")
            await self.suffers(liar, EXEC_MEMORY, EXEC_TURN, ExecSync=attack, UpdateContainer=other)

    async def test_shells(self) -> None:
        liar = await self.replace_agent()
        for attack in ("output", "empty", "huge", "never", "broken"):
            await self.suffers(liar, Shell=attack)

    async def test_whatever_the_protocol_can_carry(self) -> None:
        """Every method answers with messages of arbitrary shapes, each of them different."""
        liar = await self.replace_agent()
        corpus = {method.name: _drawn(method.name, SHAPES) for method in vmserver.Agent.methods}
        before = self.memory()
        self.forget_highest_memory()
        turns: list[float] = []
        calls: list[float] = []
        absent: list[set[str]] = []
        for _ in range(TRIES):
            self.absent = set()
            self.forget_turns()
            await liar.attack(corpus, **dict.fromkeys(corpus, "corpus"))
            asking = Deferred.fromCoroutine(self.ask_everything(corpus))
            await self.call_honest(SECONDS)
            await asking
            turns.append(self.longest_turn)
            calls.append(self.longest_call)
            absent.append(self.absent)
        slow = slowness()
        self.assertLess(min(turns), TURN * slow, turns)
        self.assertLess(min(calls), CALL * slow, calls)
        self.assertIn(set(), absent)
        self.assertLess(self.memory("VmHWM") - before, MEMORY)
        for failure in ("Traceback", "Unhandled"):
            self.assertNotIn(failure, self.log)


def _drawn(method: str, count: int) -> list[str]:
    """Return `count` random responses, in base64."""
    found: list[str] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(responses(method))
    def keep(payload: bytes) -> None:
        found.append(base64.b64encode(payload).decode())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep()
    return found


class SpoilTests(HostileCase):
    """Answers about the other pods stay complete, and those about the hostile pod can be sent."""

    honest = 2

    async def test_figures_of_one_do_not_fail_lists_of_all(self) -> None:
        liar = await self.replace_agent()
        await liar.attack(Stats="negative")
        await self.in_state(self.victim, cri.CONTAINER_RUNNING, 40.0)
        metrics = await self.until_listed(
            lambda: self.runtime.ListPodSandboxMetrics(cri.ListPodSandboxMetricsRequest(), timeout=20.0)
        )
        self.assertEqual({one.pod_sandbox_id for one in metrics.pod_metrics}, {*self.pods, self.bad})
        stats = await self.runtime.ListPodSandboxStats(cri.ListPodSandboxStatsRequest(), timeout=20.0)
        (bad,) = (one for one in stats.stats if one.attributes.id == self.bad)
        self.assertEqual(bad.linux.cpu.timestamp, 0)
        self.assertEqual(bad.linux.cpu.usage_core_nano_seconds.value, 2**63 - 1)
        self.assertEqual((bad.linux.cpu.psi.Full.Avg10, bad.linux.cpu.psi.Full.Avg60), (0.0, 0.0))

    async def test_figures_that_are_too_large_leave_their_own_pod_out(self) -> None:
        liar = await self.replace_agent()
        for attack in ("names", "unknown", "cards", "text", "huge"):
            await liar.attack(Stats=attack)
            await self.in_state(self.victim, cri.CONTAINER_RUNNING, 40.0)
            answer = await self.runtime.ListPodSandboxStats(cri.ListPodSandboxStatsRequest(), timeout=20.0)
            self.assertLessEqual(set(self.pods), {one.attributes.id for one in answer.stats})
            self.assertLess(answer.ByteSize(), 64 * 1024)

    async def until_listed(self, ask: Any) -> Any:
        while True:
            answer = await ask()
            if len(answer.pod_metrics) == len(self.pods) + 1:
                return answer
            await self.sleep(0.3)

    @slow(6, "an agent that was refused is left alone for a while")
    async def test_last_words_of_one_do_not_end_listening(self) -> None:
        stream = self.runtime.GetContainerEvents(cri.GetEventsRequest(), timeout=None)
        self.addCleanup(stream.cancel)
        liar = await self.replace_agent()
        await liar.attack(Watch="message")
        await self.in_state(self.victim, cri.CONTAINER_UNKNOWN, 20.0)
        await liar.attack(Watch="words")
        event = await Deferred.fromCoroutine(self.event_of(stream, self.victim)).addTimeout(
            60.0, self.reactor
        )
        self.assertLess(event.ByteSize(), 32 * 1024)
        (status,) = event.containers_statuses
        self.assertEqual(status.state, cri.CONTAINER_EXITED)
        self.assertRegex(status.message, "^x{4096}(?!x)")
        self.assertLess(len(status.message), 5000)  # with the node's own words
        self.assertGreater(status.finished_at, 0)
        (other,) = (self.pods[one] for one in list(self.pods)[:1])
        await self.runtime.StopContainer(cri.StopContainerRequest(container_id=other), timeout=30.0)
        await Deferred.fromCoroutine(self.event_of(stream, other)).addTimeout(60.0, self.reactor)

    async def event_of(self, stream: Any, container: str) -> Any:
        async for event in stream:
            if event.container_id == container and event.container_event_type == cri.CONTAINER_STOPPED_EVENT:
                return event
        raise AssertionError("it ended")
