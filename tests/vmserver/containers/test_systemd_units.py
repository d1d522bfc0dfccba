# SPDX-License-Identifier: Apache-2.0
"""systemd in particular: privileges, limits, mounts, properties of units, and a journal that rotates."""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.systemd_bus import Bus
from infranetes_common.wire import cri
from tests.contract.container_sessions import living
from tests.harness.needs import needs_systemd
from tests.support.systemd import Inside, Systemd
from tests.vmserver.containers.test_systemd import SystemdCase
from vmserver.containers.journal_logs import parse
from vmserver.containers.resources import cpu_weight
from vmserver.containers.systemd import privileges, units
from vmserver.containers.systemd.programs import CannotRun, Located, locate

reactor = installed()


def secured(**fields: Any) -> Any:
    """Return a LinuxContainerConfig with these fields of the security context."""
    return cri.LinuxContainerConfig(security_context=cri.LinuxContainerSecurityContext(**fields))


class UnitTests(SystemdCase, TestCase):
    """What containers see, according to their own output."""

    async def output(self, script: str, **fields: Any) -> str:
        """Return the output of a container that runs `script`."""
        id = await self.run_container("sh", "-c", script, **fields)
        await self.ended(id)
        return "\n".join(record.line.decode() for record in await self.lines(id))

    async def test_without_a_command_the_image_is_run(self) -> None:
        id = await self.create(args=["one", "two words", "$HOME %n \\x41"])
        await self.provider.start_container(id)
        await self.ended(id)
        path = self.directory / "images" / self.image_id.removeprefix("sha256:")
        self.assertEqual(
            [record.line.decode() for record in await self.lines(id)],
            [f"{path} runs with one two words $HOME %n \\x41"],
        )

    async def test_arguments_and_variables_are_passed_as_they_are(self) -> None:
        odd = "$X ${X} %i 'q' \"d\" \\n; exit 9 ż"
        value = "a=b $PATH %h\ttab\nline"
        id = await self.run_container(
            "sh",
            "-c",
            'printf "%s|%s" "$1" "$ODD"',
            "sh",
            odd,
            envs=[cri.KeyValue(key="ODD", value=value.encode())],
        )
        await self.ended(id)
        self.assertEqual(
            b"\n".join(record.line for record in await self.lines(id)).decode(), f"{odd}|{value}"
        )

    async def test_user_and_groups_are_the_configured_ones_and_reported(self) -> None:
        linux = secured(
            run_as_user=cri.Int64Value(value=12345), run_as_group=cri.Int64Value(value=3000),
            supplemental_groups=[4000],
        )  # fmt: skip
        id = await self.run_container("sh", "-c", "id -u; id -g; id -G; sleep 600", linux=linux)
        user = (await self.state(id)).user.linux
        self.assertEqual((user.uid, user.gid), (12345, 3000))
        self.assertIn(4000, user.supplemental_groups)
        inside = await self.provider.exec_sync(id, ["sh", "-c", "id -u; id -g; id -G"], 30.0, 1000)
        self.assertEqual(inside.stdout.split()[:2], [b"12345", b"3000"])
        self.assertIn(b"4000", inside.stdout.split()[2:])

    async def test_a_known_user_has_its_own_group(self) -> None:
        nobody = pwd.getpwnam("nobody")
        linux = secured(run_as_user=cri.Int64Value(value=nobody.pw_uid))
        self.assertEqual(await self.output("id -g", linux=linux), str(nobody.pw_gid))

    async def test_a_user_that_the_machine_lacks_can_not_start(self) -> None:
        id = await self.create("true", linux=secured(run_as_username="no-such-user"))
        words = await self.refused(FailedPrecondition, self.provider.start_container(id))
        state = await self.state(id)
        self.assertEqual(
            (state.state, state.exit_code, state.reason), (cri.CONTAINER_EXITED, 128, "StartError")
        )
        self.assertIn("USER", words)

    async def test_codes_that_systemd_uses_too_are_the_programs_own(self) -> None:
        for code in (203, 217):
            state = await self.ended(await self.run_container("sh", "-c", f"exit {code}"))
            self.assertEqual((state.exit_code, state.reason), (code, "Error"))

    async def test_a_file_that_the_kernel_refuses_to_execute(self) -> None:
        file = self.directory / "no-program"
        file.write_bytes(b"\x7fELF nothing of the kind")
        file.chmod(0o755)
        id = await self.create(str(file))
        words = await self.refused(InvalidArgument, self.provider.start_container(id))
        self.assertIn("format", words)
        self.assertEqual((await self.state(id)).exit_code, 126)

    async def test_capabilities_are_the_default_or_configured_ones(self) -> None:
        script = "grep -E 'CapBnd|NoNewPrivs' /proc/self/status"
        usual = (await self.output(script)).split()[1]
        self.assertEqual(int(usual, 16), privileges.capabilities(cri.Capability()))
        none = secured(no_new_privs=True, capabilities=cri.Capability(drop_capabilities=["ALL"]))
        self.assertEqual(await self.output(script, linux=none), "CapBnd:\t0000000000000000\nNoNewPrivs:\t1")
        id = await self.run_container("sleep", "600", linux=none)
        inside = (await self.provider.exec_sync(id, ["setpriv", "--dump"], 30.0, 1000)).stdout.decode()
        self.assertIn("Capability bounding set: [none]", inside)
        self.assertIn("no_new_privs: 1", inside)

    async def test_paths_of_the_machine_are_mounted_also_for_commands(self) -> None:
        (self.memory / "shared").mkdir()
        (self.memory / "shared" / "file").write_text("from the machine")
        mounts = [
            cri.Mount(container_path="/mnt", host_path=str(self.memory / "shared"), readonly=True),
            cri.Mount(container_path="/media", host_path=str(self.memory / "shared")),
        ]
        script = (
            "cat /mnt/file; echo; touch /mnt/x 2>/dev/null || echo read-only; touch /media/y && echo written"
        )
        id = await self.run_container("sh", "-c", f"{script}; sleep 600", mounts=mounts)

        async def three() -> bool:
            return len(await self.lines(id)) == 3

        await self.until(three, "it has written")
        self.assertEqual(
            [record.line for record in await self.lines(id)], [b"from the machine", b"read-only", b"written"]
        )
        inside = await self.provider.exec_sync(id, ["ls", "/mnt"], 30.0, 1000)
        self.assertEqual(inside.stdout, b"file\ny\n")
        self.assertEqual(os.listdir("/mnt").count("file"), 0)

    async def test_a_read_only_root_with_what_is_mounted_writable(self) -> None:
        (self.memory / "data").mkdir()
        mounts = [cri.Mount(container_path="/media", host_path=str(self.memory / "data"))]
        script = "touch /usr/x 2>/dev/null || echo read-only; touch /media/x && echo written"
        self.assertEqual(
            await self.output(script, mounts=mounts, linux=secured(readonly_rootfs=True)),
            "read-only\nwritten",
        )

    async def test_limits_are_the_kernels_and_apply_to_commands_too(self) -> None:
        limits = cri.LinuxContainerResources(
            memory_limit_in_bytes=48 << 20, cpu_shares=512, cpu_quota=50_000, cpu_period=100_000,
            oom_score_adj=500,
            unified={"pids.max": "32", "memory.oom.group": "1", "memory.swap.max": "0"},
        )  # fmt: skip
        id = await self.run_container("sleep", "600", linux=cri.LinuxContainerConfig(resources=limits))
        pid = self.systemd.outside((await self.state(id)).pid)
        self.assertEqual(Path(f"/proc/{pid}/oom_score_adj").read_text(), "500\n")
        self.assertEqual(self.limit(pid, "memory"), str(48 << 20))
        self.assertEqual(self.limit(pid, "pids"), "32")
        await self.provider.update(id, cri.LinuxContainerResources(memory_limit_in_bytes=64 << 20))
        self.assertEqual(self.limit(pid, "memory"), str(64 << 20))
        marker = str(900000 + os.getpid() % 100000)
        running = self.provider.exec_sync(id, ["sleep", marker], 0.0, 1000)
        running.addErrback(lambda failure: None)

        def itself() -> list[int]:  # without the processes that start it
            whole = f"sleep\0{marker}\0"
            return [
                one for one in living("sleep", marker) if Path(f"/proc/{one}/cmdline").read_text() == whole
            ]

        await self.until(itself, "the command runs")
        for other in itself():
            self.assertEqual(
                Path(f"/proc/{other}/cgroup").read_text(), Path(f"/proc/{pid}/cgroup").read_text()
            )
        running.cancel()
        await running

    def limit(self, pid: int, which: str) -> str:
        """Return the limit of memory or pids in a process's control group."""
        root = Path("/sys/fs/cgroup")
        groups = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
        old, new = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max", "pids.max")}[
            which
        ]
        if which in groups:
            return (root / which / groups[which].lstrip("/") / old).read_text().strip()
        return (root / groups[""].lstrip("/") / new).read_text().strip()

    async def test_its_surviving_processes_end_with_it(self) -> None:
        marker = str(800000 + os.getpid() % 100000)
        id = await self.run_container("sh", "-c", f"setsid sleep {marker} & exit 0")
        self.assertEqual((await self.ended(id)).exit_code, 0)

        await self.until(lambda: not living("sleep", marker), "it has ended")

    async def test_nul_bytes_and_what_has_no_newline_are_kept(self) -> None:
        id = await self.run_container("sh", "-c", r"printf 'a\0b\n\n'; printf 'é\377'")
        await self.ended(id)
        records = await self.lines(id)
        self.assertEqual([record.line for record in records], [b"a\0b", b"", b"\xc3\xa9\xff"])

    async def test_two_agents_that_start_one_run_it_once(self) -> None:
        marker = self.memory / "started"
        marker.touch()
        mount = cri.Mount(container_path="/media", host_path=str(self.memory))
        id = await self.create("sh", "-c", "echo x >> /media/started; sleep 600", mounts=[mount])
        first = self.provider.start_container(id)
        second = (await self.started()).start_container(id)
        for each in (first, second):
            self.assertEqual((await each).state, cri.CONTAINER_RUNNING)
        await self.until(lambda: marker.read_text(), "it runs")
        self.assertEqual(marker.read_text(), "x\n")

    async def test_systemd_forgets_the_units_of_an_ended_container(self) -> None:
        id = await self.run_container("false")
        await self.ended(id)

        async def none() -> bool:
            (found,) = await self.provider._systemd.bus.manager(
                "ListUnitsByPatterns", "asas", ([], [f"infranetes*{id}*"])
            )
            return not found

        await self.until(none, "its units are gone")

    async def test_what_is_not_supported_is_named(self) -> None:
        for fields, named in (
            ({"tty": True}, "config.tty"),
            ({"devices": [cri.Device(host_path="/dev/null")]}, "config.devices"),
            ({"mounts": [cri.Mount(container_path="/x", host_path="/no/such")]}, "/no/such"),
            ({"linux": secured(capabilities=cri.Capability(add_capabilities=["NO_SUCH"]))}, "NO_SUCH"),
            ({"linux": secured(run_as_group=cri.Int64Value(value=1))}, "run_as_group"),
        ):
            config = cri.ContainerConfig(command=["true"], **fields)
            making = self.provider.create("a" * 32, self.image_id, config, cri.PodSandboxConfig())
            self.assertIn(named, await self.refused(InvalidArgument, making))
        self.assertEqual(await self.provider.containers(), [])

    async def test_the_connection_to_systemd_is_made_again(self) -> None:
        id = await self.run_container("sh", "-c", "sleep 1; exit 4")
        bus: Bus = self.provider._systemd.bus
        bus.transport.abortConnection()
        await self.until(lambda: self.provider._systemd.bus is not bus, "the loss is seen")
        self.assertEqual(self.provider._systemd.bus, None)
        await self.refused(Unavailable, self.provider.containers())
        await self.until(lambda: self.provider._systemd.bus is not None, "it is connected again")
        self.assertEqual((await self.ended(id)).exit_code, 4)


class RotationTests(SystemdCase, TestCase):
    """A journal that soon deletes entries."""

    def manager(self) -> Systemd:
        return Systemd(journal="4M", lines="SystemMaxFileSize=512K\nRuntimeMaxFileSize=512K\n").start()

    async def tearDown(self) -> None:
        try:
            await super().tearDown()
        finally:
            self.systemd.stop()

    async def test_deleted_entries_are_a_gap_and_nothing_is_repeated(self) -> None:
        script = "i=0; while [ $i -lt 5000 ]; do i=$((i+1)); echo $i $0; done"
        id = await self.run_container("sh", "-c", script, "x" * 4000)
        first: list[Any] = []
        while not first:
            # To journalctl, a file that is being deleted is damaged; the node asks again, too.
            with contextlib.suppress(Unavailable):
                first = await self.lines(id)
        await self.ended(id)
        records = await self.lines(id)
        numbers = [int(record.line.split()[0]) for record in records]
        self.assertEqual(numbers[-1], 5000)
        self.assertEqual(numbers, list(range(numbers[0], 5001)))
        self.assertGreater(numbers[0], 1)
        self.assertEqual([record.gap for record in records[:2]], [True, False])
        middle = first[len(first) // 2]  # the last one may be the very last
        rest = await self.lines(id, middle.cursor)
        last = int(middle.line.split()[0])
        self.assertEqual(int(rest[0].line.split()[0]), max(last + 1, numbers[0]))
        self.assertEqual(rest[0].gap, last + 1 < numbers[0])


class DownTests(TestCase):
    """A machine without systemd."""

    async def test_no_socket(self) -> None:
        from twisted.internet.endpoints import UNIXClientEndpoint

        with self.assertRaises(Unavailable) as caught:
            await Bus.connect(reactor, UNIXClientEndpoint(reactor, "/no/such"), lambda *_: None, lambda: None)
        self.assertIn("process 1", str(caught.exception))

    @needs_systemd
    async def test_one_that_ends_fails_the_calls_under_way(self) -> None:
        manager = Systemd().start()
        self.addCleanup(manager.stop)
        lost: Deferred[None] = Deferred()
        bus = await Bus.connect(reactor, Inside(manager), lambda *_: None, lambda: lost.callback(None))
        call = Deferred.fromCoroutine(bus.manager("GetUnit", "s", ("test.target",)))
        manager.stop()
        await lost
        call.addErrback(lambda failure: failure.trap(Unavailable))
        await call
        with self.assertRaises(Unavailable):
            await bus.manager("GetUnit", "s", ("test.target",))


class TranslationTests(SynchronousTestCase):
    """Configurations become names and values of properties."""

    @given(st.text("0123456789abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=64))
    def test_a_container_is_known_by_its_units_path(self, id: str) -> None:
        self.assertEqual(units.container_of(units.object_path(units.unit_name(id))), id)
        self.assertEqual(units.container_of(units.object_path(f"{units.LOGGER_PREFIX}{id}.0.service")), "")

    def test_what_is_not_utf_8_in_a_variable_is_replaced(self) -> None:
        config = cri.ContainerConfig(envs=[cri.KeyValue(key="A", value=b"a\xff")])
        self.assertEqual(units.environment(config)["A"], "a\ufffd")

    def test_shares_as_weight(self) -> None:
        self.assertEqual([cpu_weight(shares) for shares in (2, 1024, 262144)], [1, 39, 10000])

    def test_a_limit_of_memory_can_be_taken_away(self) -> None:
        found = dict(units.limits(cri.LinuxContainerResources(memory_limit_in_bytes=-1)))
        self.assertEqual(found, {name: ("t", units.INFINITY) for name in ("MemoryMax", "MemorySwapMax")})

    def test_what_kubelet_adds_where_its_node_has_cgroup_2(self) -> None:
        limits = cri.LinuxContainerResources(unified={"memory.oom.group": "1", "memory.swap.max": "0"})
        self.assertEqual(units.limits(limits), [("MemorySwapMax", ("t", 0))])
        for name, value in (("memory.oom.group", "0"), ("io.max", "1")):
            limits = cri.LinuxContainerResources(unified={name: value})
            self.assertIn(name, str(self.assertRaises(InvalidArgument, units.limits, limits)))

    def test_cpus_as_a_bit_mask(self) -> None:
        found = dict(units.limits(cri.LinuxContainerResources(cpuset_cpus="0-2,9")))
        self.assertEqual(found["AllowedCPUs"], ("ay", bytes([0b111, 0b10])))
        for wrong in ("x", "3-1", "-1", "1,,2", "99999"):
            with self.assertRaises(InvalidArgument):
                units.limits(cri.LinuxContainerResources(cpuset_cpus=wrong))

    def test_limits_of_huge_pages_that_are_none(self) -> None:
        pages = [cri.HugepageLimit(page_size="2MB", limit=0)]
        self.assertEqual(units.limits(cri.LinuxContainerResources(hugepage_limits=pages)), [])

    def test_programs_are_found_with_the_mounts(self) -> None:
        mounts = [cri.Mount(container_path="/opt/tools", host_path="/bin")]
        found = locate(["/opt/tools/sh"], {}, "", mounts)
        assert isinstance(found, Located)
        self.assertEqual(found.path, "/opt/tools/sh")
        for words, code in (
            (["no-such"], 127),
            (["/etc"], 126),
            (["/etc/passwd"], 126),
            (["/opt/tools/no"], 127),
        ):
            missing = locate(words, {"PATH": "/bin:/usr/bin"}, "/", mounts)
            assert isinstance(missing, CannotRun)
            self.assertEqual(missing.code, code)

    def test_cursors(self) -> None:
        place = f"s={'a' * 32};i=1f;b={'b' * 32};m=2;t=3;x=4"
        self.assertEqual(parse(f"1.7.{place}"), (7, place))
        for wrong in (place, f"2.7.{place}", f"1.-7.{place}", f"1.7.{place} --version", "1.7."):
            with self.assertRaises(InvalidArgument):
                parse(wrong)
