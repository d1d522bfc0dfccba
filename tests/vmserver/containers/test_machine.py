# SPDX-License-Identifier: Apache-2.0
"""The ContainerProvider whose container is the VM: here, the machine that runs the tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from infranetes_common.wire.vmserver import LogRecord
from tests.contract.container_provider import ExecContract
from tests.contract.container_provider_case import ContainerProviderCase
from tests.contract.container_sessions import Heard
from tests.harness.needs import needs_mounts, needs_systemd
from tests.support.peak import peak
from tests.support.systemd import Systemd
from vmserver.containers.interface import Streams
from vmserver.containers.journal import Entry
from vmserver.containers.machine import log
from vmserver.containers.machine.provider import MachineConfig, MachineProvider

reactor = installed()
IMAGE = "sha256:" + "e" * 64


class MachineCase(ContainerProviderCase):
    """Keeps the state in the test's directory, where its stop command also leaves a marker."""

    systemd: Systemd | None = None

    def make_provider(self) -> Any:
        config = MachineConfig(
            state_dir=self.directory / "state",
            stop_command=("touch", str(self.directory / "off")),
            kill_command=("touch", str(self.directory / "killed")),
        )
        if self.systemd is not None:
            config = attrs.evolve(config, journal_dir=self.systemd.run / "log/journal")
        return MachineProvider(reactor, config)

    async def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="machine-", dir="/dev/shm"))
        self.providers = []
        self.told = []
        self.image_id = IMAGE
        self.provider = await self.started()

    async def tearDown(self) -> None:
        try:
            for state in await self.provider.containers():
                await self.provider.remove(state.id)
            self.assertNotIn(str(self.directory), Path("/proc/mounts").read_text())
        finally:
            shutil.rmtree(self.directory)

    async def run_container(self, *command: str, **fields: Any) -> str:
        """Run the container without the command, which is ignored for a machine."""
        return await super().run_container(**fields)


class MachineExecTests(MachineCase, ExecContract, TestCase):
    """ExecSync."""

    async def test_only_a_running_container_runs_commands(self) -> None:
        id = await self.create()
        await self.refused(FailedPrecondition, self.exec(id, "true"))
        await self.provider.start_container(id)
        await self.provider.stop_container(id, 1)
        await self.refused(FailedPrecondition, self.exec(id, "true"))


class MachineTests(MachineCase, TestCase):
    """Create, start, stop, remove."""

    async def test_it_runs_until_it_is_stopped_also_for_the_next_agent(self) -> None:
        id = await self.create()
        for _ in range(2):
            state = await self.provider.start_container(id)
        self.assertEqual((state.state, state.pid, state.image_id), (cri.CONTAINER_RUNNING, 1, IMAGE))
        await self.restarted()
        self.assertEqual(await self.state(id), state)
        self.assertEqual(await self.provider.images(), [IMAGE])
        await self.refused(FailedPrecondition, self.provider.remove_image(IMAGE))

    async def test_stopping_it_powers_the_machine_off(self) -> None:
        id = await self.run_container()
        for _ in range(2):
            state = await self.provider.stop_container(id, 30)
        self.assertEqual((state.state, state.exit_code, state.reason), (cri.CONTAINER_EXITED, 0, "Completed"))
        self.assertTrue((self.directory / "off").exists())
        self.assertEqual(self.states_told(id)[-1], cri.CONTAINER_EXITED)
        await self.restarted()
        self.assertEqual(await self.state(id), state)
        await self.refused(FailedPrecondition, self.provider.start_container(id))

    async def test_without_a_grace_period_it_is_powered_off_at_once(self) -> None:
        id = await self.run_container()
        state = await self.provider.stop_container(id, 0)
        self.assertEqual((state.exit_code, state.reason), (137, "Error"))
        self.assertTrue((self.directory / "killed").exists())

    async def test_removing_it_powers_it_off(self) -> None:
        id = await self.run_container()
        for _ in range(2):
            await self.provider.remove(id)
        self.assertTrue((self.directory / "killed").exists())
        self.assertEqual(await self.provider.containers(), [])

    async def test_a_second_container_is_refused_and_the_first_asked_for_again_is_there(self) -> None:
        id = await self.create()
        other = self.provider.create("b" * 32, IMAGE, cri.ContainerConfig(), cri.PodSandboxConfig())
        self.assertIn(id, await self.refused(FailedPrecondition, other))
        again = await self.provider.create(id, IMAGE, cri.ContainerConfig(), cri.PodSandboxConfig())
        self.assertEqual(again, await self.state(id))

    async def test_what_a_vm_does_not_support_is_named(self) -> None:
        for fields, named in (
            ({"command": ["true"]}, "config.command"),
            ({"devices": [cri.Device(container_path="/dev/x", host_path="/dev/sdb")]}, "config.devices"),
            ({"args": ["x"]}, "config.args"),
            ({"tty": True}, "config.tty"),
            ({"mounts": [cri.Mount(container_path="/x", host_path="/no/such")]}, "/no/such"),
        ):
            making = self.provider.create(
                "a" * 32, IMAGE, cri.ContainerConfig(**fields), cri.PodSandboxConfig()
            )
            self.assertIn(named, await self.refused(InvalidArgument, making))
        self.assertEqual(await self.provider.containers(), [])

    async def test_unknown_ones_are_not_found(self) -> None:
        for work in (
            self.provider.start_container("b" * 32),
            self.provider.stop_container("b" * 32, 1),
            self.provider.exec_sync("b" * 32, ["true"], 1.0, 10),
            self.provider.update("b" * 32, cri.LinuxContainerResources()),
        ):
            await self.refused(NotFound, work)
        await self.provider.remove("b" * 32)

    @needs_mounts
    async def test_mounts_are_there_until_it_is_removed(self) -> None:
        source, target = self.directory / "secret", self.directory / "var" / "run secret"
        source.mkdir()
        (source / "token").write_text("t")
        mount = cri.Mount(container_path=str(target), host_path=str(source), readonly=True)
        id = await self.create(mounts=[mount])
        await self.provider.start_container(id)
        await self.restarted()
        self.assertEqual((target / "token").read_text(), "t")
        with self.assertRaises(OSError):
            (target / "other").touch()
        await self.provider.remove(id)
        self.assertEqual(os.listdir(target), [])

    @needs_mounts
    async def test_after_a_reboot_each_mount_is_made_once_its_source_is_there(self) -> None:
        late, there = self.directory / "late", self.directory / "there"
        mounts = []
        for source in (late, there):
            source.mkdir()
            (source / "file").write_text(source.name)
            at = str(self.directory / "at" / source.name)
            mounts.append(cri.Mount(container_path=at, host_path=str(source)))
        id = await self.run_container(mounts=mounts)
        for mount in mounts:
            subprocess.run(["umount", mount.container_path], check=True)
        late.rename(self.directory / "away")
        provider = self.make_provider()
        for _ in range(2):
            self.assertIn(str(late), await self.refused(Unavailable, provider.start()))
            self.assertEqual(os.listdir(mounts[0].container_path), [])
            self.assertEqual(os.listdir(mounts[1].container_path), ["file"])
        (self.directory / "away").rename(late)
        for _ in range(2):
            await provider.start()
        self.assertEqual(Path(mounts[0].container_path, "file").read_text(), "late")
        table = Path("/proc/self/mounts").read_text()
        self.assertEqual([table.count(f" {mount.container_path} ") for mount in mounts], [1, 1])
        await provider.remove(id)

    async def test_a_session_with_its_exit_code(self) -> None:
        id = await self.run_container(envs=[cri.KeyValue(key="WHO", value=b"pod")], working_dir="/tmp")
        streams = Streams(stdin=True, stdout=True, stderr=True)
        session = await self.provider.exec_session(id, ["sh", "-c", 'cat; echo "$WHO $PWD"; exit 4'], streams)
        heard = Heard(session)
        await session.write(b"in\n")
        session.close_stdin()
        self.assertEqual((await heard.over, heard.out), (4, b"in\npod /tmp\n"))

    async def test_its_usage_is_the_machines(self) -> None:
        id = await self.run_container()
        (usage,) = await self.provider.usage()
        self.assertEqual(usage.id, id)
        self.assertGreater(usage.usage.memory.working_set, 0)


class MachineLimitTests(MachineCase, TestCase):
    """Limits that have no effect are reported as they were last set."""

    async def test_each_size_of_huge_pages_has_one_limit(self) -> None:
        id = await self.run_container()
        for limit in (8 << 20, 4 << 20, 4 << 20):
            pages = [cri.HugepageLimit(page_size="2MB", limit=limit)]
            found = await self.provider.update(id, cri.LinuxContainerResources(hugepage_limits=pages))
            self.assertEqual(list(found.resources.hugepage_limits), pages)


@needs_systemd
class MachineLogTests(MachineCase, TestCase):
    """The log is a real systemd's journal."""

    async def setUp(self) -> None:
        self.systemd = Systemd().start()
        await super().setUp()

    async def tearDown(self) -> None:
        try:
            await super().tearDown()
        finally:
            assert self.systemd is not None
            self.systemd.stop()

    def write(self, *words: str, priority: int = 6) -> None:
        """Write to the journal as one of the machine's programs."""
        assert self.systemd is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            for word in words:
                size = len(word).to_bytes(8, "little")
                fields = f"SYSLOG_IDENTIFIER=test\nPRIORITY={priority}\nMESSAGE\n".encode() + size
                sending.sendto(
                    fields + word.encode() + b"\n", str(self.systemd.run / "systemd/journal/socket")
                )

    async def test_it_is_the_journal_with_exact_cursors(self) -> None:
        self.write("before")
        id = await self.run_container()
        self.write("one\ntwo", "x" * 40000)
        self.write("bad", priority=3)

        async def there() -> bool:
            return any(record.line.endswith(b": bad") for record in await self.lines(id))

        await self.until(there, "it is written")
        records = await self.lines(id)
        said = [record for record in records if record.line.startswith(b"test") or b"x" * 100 in record.line]
        self.assertEqual(
            [record.line.partition(b": ")[2] for record in said[:3]], [b"before", b"one", b"two"]
        )
        self.assertEqual([record.partial for record in said[3:]], [True, True, False, False])
        self.assertEqual(said[-1].stream, LogRecord.STDERR)
        self.assertFalse(any(record.gap for record in records))
        await self.restarted()
        for number, record in enumerate(records, 1):
            if number % 5 == 0 or number > len(records) - 7:
                rest = await self.lines(id, record.cursor)
                # systemd itself may have written more in the meantime, for example about an unmount
                self.assertEqual(rest[: len(records) - number], records[number:])
        with self.assertRaises(InvalidArgument):
            await self.lines(id, "1.x")

    async def test_following_and_attaching_end_with_it(self) -> None:
        id = await self.run_container()
        following = Deferred.fromCoroutine(self.lines(id, follow=True))
        session = await self.provider.attach_session(id, Streams(stdout=True, stderr=True))
        heard = Heard(session)
        self.write("while it runs")
        await self.until(lambda: b"while it runs" in heard.out, "attached sees it")
        await self.provider.stop_container(id, 5)
        self.assertTrue(any(b"while it runs" in record.line for record in await following))
        self.assertEqual(await heard.over, 0)


class LineTests(SynchronousTestCase):
    """Journal entries become records."""

    @given(st.binary(max_size=60000), st.integers(0, 5))
    def test_the_rest_of_an_entry_is_the_same_for_every_reader(self, message: bytes, known: int) -> None:
        entry = {"__CURSOR": b"s", "MESSAGE": message, "SYSLOG_IDENTIFIER": b"p", "_PID": b"7"}
        every = [*log.entry_records(entry, 0, False)]
        self.assertEqual([*log.entry_records(entry, known, False)], every[known:])
        whole = b"".join(record.line + (b"" if record.partial else b"\n") for record in every)
        self.assertEqual(whole, b"".join(b"p[7]: " + line + b"\n" for line in message.split(b"\n")))
        self.assertTrue(all(len(record.line) <= log.PART_BYTES for record in every))

    def test_an_entry_of_very_many_lines_is_never_all_of_them_at_once(self) -> None:
        """Whoever may write to the journal names itself, too: before each line."""
        for message, name in ((b"\n" * (1 << 20), b"p"), (b"ab\n" * (1 << 18), b"n" * 100_000)):
            entry = {"__CURSOR": b"s", "MESSAGE": message, "SYSLOG_IDENTIFIER": name, "_PID": b"7"}
            self.assertEqual(sum(1 for _ in log.lines(entry)), log.MAX_RECORDS)

            def read(entry: Entry = entry) -> None:
                for line, _ in islice(log.lines(entry), 10_000):
                    self.assertLess(len(line), 1000)

            self.assertLess(peak(read), 1 << 16)
