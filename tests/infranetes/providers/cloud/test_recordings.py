# SPDX-License-Identifier: Apache-2.0
"""VMs' lives are recorded, and ended whatever happens; simulators have all that recordings of clouds have.

A recording that a user sends goes into `recordings/` as NAME.jsonl. What is in it, missing in the simulator
and not needed is listed in NAME.accepted.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError
from infranetes_common.reactors import installed
from tests.contract.pod_provider_case import DyingDaemon
from tests.harness.durations import slow
from tests.harness.needs import tool
from tests.support.clouds.agent_processes import ROOT
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.recordings import libclouds, simulated
from tests.support.clouds.recordings.compare import lacking
from tests.support.clouds.recordings.recording import Recording, read
from tests.support.clouds.recordings.session import NOTES, Session
from tests.support.clouds.recordings.wire import AWS, GCP

NEEDS = (tool("wheels"),)

RECORDINGS = Path(__file__).parent / "recordings"

reactor = installed()


def accepted(name: str) -> set[str]:
    """Return what is missing in the simulator and not needed."""
    path = RECORDINGS / f"{name}.accepted"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line for line in lines if line and not line.startswith("#")}


class SessionCase(TestCase):
    """A simulated cloud, and sessions that record it.

    :cvar lasting: whether transient states last long enough to be recorded."""

    cloud: ClassVar[str] = AWS
    lasting: ClassVar[bool] = False
    timeout = 180.0

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.cluster = f"record-{secrets.token_hex(4)}"
        self.world: Any = simulated.world(reactor, self.cloud, self.directory, self.cluster, self.lasting)
        self.said: list[str] = []
        self.when: Callable[[str], object] = lambda words: None

    def tearDown(self) -> Deferred[None]:
        return start(self.finish())

    async def finish(self) -> None:
        try:
            self.assertEqual(self.world.holdings(), [])
            self.assertEqual(self.world.malformed, [])
        finally:
            await self.world.stop()
            shutil.rmtree(self.directory, ignore_errors=True)

    def say(self, words: str) -> None:
        self.said.append(words)
        self.when(words)

    def session(self, **changes: Any) -> Session:
        self.made = simulated.session(
            reactor, self.cloud, self.world, self.directory, self.cluster, self.say, **changes
        )
        return self.made

    def interrupt_at(self, step: str) -> None:
        """Interrupt the session at a step."""

        def when(words: str) -> None:
            if step in words:
                reactor.callLater(0.01, self.made.interrupt)

        self.when = when

    def asked(self) -> set[str]:
        return {call["Action"] for call in self.world.requests}


class RecordedTests(SessionCase):
    """A life is recorded, and has what others' recordings have."""

    maxDiff = None
    lasting = True
    more: ClassVar[tuple[str, str]] = ("CreateVolume", "CreateVolumeResponse")  # a call, and its response

    async def test_a_life_is_recorded_and_has_what_other_recordings_have(self) -> None:
        """Even where a call was throttled, as any call may be, and where the end was not waited for."""
        launch = "RunInstances" if self.cloud == AWS else "launch"
        throttled = self.world.faults.add(FaultKind.THROTTLE, launch, times=1)
        self.interrupt_at("ending everything")
        await self.session().run()
        self.assertEqual(throttled.happened, 1)
        self.assertIn("everything that was made is destroyed", self.said)
        self.assertFalse((self.directory / NOTES).exists())
        self.assertNothingOfOurs()
        recorded = read(self.directory / "recording.jsonl")
        self.assertLacksWhatIsAccepted(f"libcloud-{self.cloud}", libclouds.recording(self.cloud), recorded)
        for path in sorted(RECORDINGS.glob("*.jsonl")):
            if (sent := read(path)).cloud == self.cloud:
                self.assertLacksWhatIsAccepted(path.stem, sent, recorded)
        self.assertOneFieldMoreIsNamed(recorded)

    def assertNothingOfOurs(self) -> None:
        """Assert that nothing of the configuration is in the recording."""
        text = (self.directory / "recording.jsonl").read_text()
        table = self.world.table()
        named = [*table.get("subnets", ()), *table.get("security_groups", ()), *table.get("zones", ())]
        for name in ("access_key", "secret_key", "endpoint", "project", "key_file", "subnetwork"):
            named.append(table.get(name, ""))
        for secret in filter(None, (*named, self.cluster, "PRIVATE KEY", "127.0.0.1")):
            self.assertNotIn(f'"{secret}', text)

    def assertLacksWhatIsAccepted(self, name: str, recording: Recording, simulated: Recording) -> None:
        """Check that the simulator differs from a recording only in the accepted ways."""
        found, known = set(lacking(recording, simulated)), accepted(name)
        self.assertEqual(
            sorted(found - known),
            [],
            f"{name}: the simulator lacks this: mend it, or list it in {name}.accepted",
        )
        self.assertEqual(sorted(known - found), [], f"mended: take this out of {name}.accepted")

    def assertOneFieldMoreIsNamed(self, recorded: Recording) -> None:
        """Assert that a copy of this recording with one more field in one answer is found to differ."""
        calls = [attrs.asdict(call) for call in recorded.calls]
        made, kind = self.more
        answer = next(call["answer"] for call in calls if call["kind"] == made and call["status"] == 200)
        answer.get(kind, answer)["multiAttachEnabled"] = "false"
        path = self.directory / "more.jsonl"
        lines = [{"recording": 1, "cloud": self.cloud}, *calls]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = lacking(read(path), recorded)
        self.assertEqual(found, [f"{kind}: multiAttachEnabled: lacking (yes or no)"])


class GoogleRecordedTests(RecordedTests):
    cloud = GCP
    more = ("compute.disks.insert", "compute#operation")


class FileTests(SynchronousTestCase):
    """The files of recordings."""

    def test_each_list_is_of_a_recording(self) -> None:
        known = {*(path.stem for path in RECORDINGS.glob("*.jsonl")), "libcloud-aws", "libcloud-gcp"}
        self.assertLessEqual({path.stem for path in RECORDINGS.glob("*.accepted")}, known)

    def test_what_is_no_recording_is_refused(self) -> None:
        path = Path(self.mktemp())
        for head in ('{"recording": 2, "cloud": "aws"}', '{"recording": 1, "cloud": "vsphere"}'):
            path.write_text(head)
            self.assertRaises(ValueError, read, path)


class EndTests(SessionCase):
    """Nothing is left, however a session ends: `finish` checks."""

    async def refused(self, **changes: Any) -> str:
        """Check that a session refuses to create anything. Return why."""
        failing: Deferred[Any] = start(self.session(**changes).run())
        return str(await self.assertFailure(failing, FailedPrecondition))

    async def test_nobody_agrees(self) -> None:
        asked: list[str] = []

        def refuse(words: str) -> Deferred[bool]:
            asked.append(words)
            return succeed(False)

        error = await self.refused(ask=refuse)
        self.assertIn("nothing was made", error)
        self.assertIn("one VM (t3.micro at ", asked[0])
        self.assertNotIn("RunInstances", self.asked())

    async def test_it_costs_more_than_the_budget(self) -> None:
        self.assertIn("and the budget is 0.0001", await self.refused(budget=0.0001))
        self.assertNotIn("RunInstances", self.asked())

    async def test_it_is_interrupted_while_the_volume_is_attached(self) -> None:
        self.interrupt_at("attaching it")
        await self.assertFailure(start(self.session().run()), CancelledError)
        self.assertIn("AttachVolume", self.asked())
        self.assertFalse((self.directory / NOTES).exists())

    async def test_it_is_interrupted_while_the_vm_is_launched_and_the_cloud_does_not_answer(self) -> None:
        """The cloud answers later."""
        impatient = {**self.world.table(), "retry_seconds": 0.02, "poll_seconds": 0.05}
        self.interrupt_at("launching a VM")
        interrupting, silent = self.when, list[Any]()

        def when(words: str) -> None:
            interrupting(words)
            if words == "ending everything":
                silent.append(self.world.faults.add(FaultKind.ERROR, "DescribeInstances", times=3))

        self.when = when
        await self.assertFailure(start(self.session(table=impatient).run()), CancelledError)
        self.assertEqual(silent[0].happened, 3)
        self.assertIn("not yet: ", "".join(self.said))
        self.assertIn("everything that was made is destroyed", self.said)

    async def test_its_time_is_over(self) -> None:
        self.world.boot_seconds = 60.0
        await self.assertFailure(start(self.session(seconds=0.5).run()), DeadlineExceeded)
        self.assertIn("RunInstances", self.asked())

    async def test_a_step_fails(self) -> None:
        allowed = self.world.policy.read_text()
        self.world.policy = self.directory / "policy.json"
        self.world.policy.write_text(allowed.replace('"ec2:AttachVolume",', ""))
        await self.assertFailure(start(self.session().run()), InfranetesError)
        self.assertIn("CreateVolume", self.asked())


class CommandTests(SessionCase):
    """`make record-cloud`, in a process of its own."""

    def command(self) -> DyingDaemon:
        config = self.directory / "infranetes.toml"
        table = {**self.world.table(), "poll_seconds": 0.05}
        lines = [f'cluster = "{self.cluster}"', "[providers.aws]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in table.items()]
        config.write_text("\n".join(lines))
        config.chmod(0o600)
        arguments = ["-m", "tests.support.clouds.recordings", AWS, "--minutes", "1"]
        arguments += ["--config", str(config), "--directory", str(self.directory)]
        process = DyingDaemon()
        reactor.spawnProcess(process, sys.executable, [sys.executable, *arguments], None, str(ROOT))
        self.addCleanup(process.kill)
        return process

    async def attaching(self) -> DyingDaemon:
        """Start a process, confirm, and wait until it attaches the volume."""
        before = self.launches()
        process = self.command()
        await self.until_said(process, b"Go on? [y/N]")
        self.assertEqual(self.launches(), before)
        process.transport.write(b"y\n")
        await self.until_said(process, b"attaching it")
        return process

    def launches(self) -> int:
        return [call["Action"] for call in self.world.requests].count("RunInstances")

    async def until_said(self, process: DyingDaemon, words: bytes) -> None:
        while words not in process.output:
            self.assertFalse(process.ended.called, process.output.decode())
            await self.sleep()

    def sleep(self) -> Deferred[None]:
        waiting: Deferred[None] = Deferred()
        reactor.callLater(0.02, waiting.callback, None)
        return waiting

    @slow(12, "two processes import the clouds' libraries and launch a VM each")
    async def test_what_a_killed_one_left_is_ended_by_the_next_which_ctrl_c_ends(self) -> None:
        killed = await self.attaching()
        killed.kill()
        await killed.ended
        [left] = self.world.running()
        process = await self.attaching()
        self.assertNotIn(left, self.world.running())
        process.transport.signalProcess(signal.SIGINT)
        await process.ended
        self.assertIsNone(process.signal)
        words = (b"an earlier recording was killed", b"everything that was made is destroyed", b"interrupted")
        for each in words:
            self.assertIn(each, process.output)
        self.assertEqual(self.world.holdings(), [])
        self.assertFalse((self.directory / AWS / NOTES).exists())
