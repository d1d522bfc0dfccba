# SPDX-License-Identifier: Apache-2.0
"""conmon and crun: containers are created, started, watched, found again and discarded."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from twisted.internet.defer import CancelledError
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.processes import oom_score_adj, start_ticks
from tests.contract.container_sessions import living
from tests.support.crun import CGROUPS
from tests.vmserver.containers.oci.case import CONMONS, CrunCase, reactor
from vmserver.containers.oci import cgroup
from vmserver.containers.oci import conmon as conmons
from vmserver.containers.oci.conmon import CannotRun, Conmon, Exit, Process, exit_code_of
from vmserver.containers.oci.runtime import Crun

MIB = 1024 * 1024

_FIND = """
import sys
from pathlib import Path
from infranetes_common.reactors import installed
from vmserver.containers.oci.conmon import Conmon, Monitored
from vmserver.containers.oci.runtime import Crun
id, bundle, root, crun = sys.argv[1:]
conmon = Conmon(installed(), Crun(installed(), Path(root), crun))
print(conmon.find(Monitored(id, Path(bundle), Path(bundle, "log"))))
"""


class ConmonTests(CrunCase):
    def gone(self, id: str) -> bool:
        """Return whether no process, cgroup or record of a container is left."""
        found = [pid for pid in os.listdir("/proc") if pid.isdecimal() and f"--cid={id}" in _command(pid)]
        groups = [path for path in cgroup.ROOT.glob(f"*/{CGROUPS}/{id}") if path.is_dir()]
        return not found and not groups and not (self.crun.root / id).exists()

    async def test_it_runs_once_it_is_started_and_its_end_is_told(self) -> None:
        made = await self.created("sh", "-c", "echo out; echo err >&2; exit 3")
        status = self.crun.status(made.container.id)
        assert status is not None
        self.assertTrue(status.waiting and status.alive)
        self.assertEqual((status.pid, status.ticks), (made.process.pid, made.process.ticks))
        self.assertEqual(made.container.log.read_text(), "")
        before = time.time_ns()
        await self.crun.start(made.container.id)
        exit = await self.end(made)
        self.assertEqual((exit.code, exit.oom_killed, exit.message), (3, False, ""))
        self.assertTrue(before - 10**9 < exit.finished_at < time.time_ns() + 10**9)
        self.assertEqual(sorted(self.lines(made)), ["stderr F err", "stdout F out"])

    async def test_a_signal_that_ends_it_is_in_the_exit_code(self) -> None:
        for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, 137)):
            script = "trap 'exit 143' TERM; echo up; while :; do sleep 0.05; done"
            made = await self.started("sh", "-c", script)
            await self.until(lambda made=made: made.container.log.read_text(), "it is up")
            status = self.crun.status(made.container.id)
            assert status is not None
            self.assertTrue(status.signal(number))
            self.assertEqual((await self.end(made)).code, code)
            self.assertFalse(status.signal(number))

    async def test_a_signal_never_hits_a_later_process_of_the_same_number(self) -> None:
        made = await self.started("sleep", "600")
        status = self.crun.status(made.container.id)
        assert status is not None
        other = type(status)(os.getpid(), 1, None, False)
        self.assertFalse(other.alive or other.signal(signal.SIGKILL))

    async def test_one_that_ends_as_it_gets_a_signal_was_not_there(self) -> None:
        made = await self.started("sleep", "600")
        status = self.crun.status(made.container.id)
        assert status is not None

        def gone(descriptor: int, number: int) -> None:
            raise ProcessLookupError

        self.patch(signal, "pidfd_send_signal", gone)
        self.assertIs(status.signal(signal.SIGTERM), False)

    async def test_commands_that_can_not_run(self) -> None:
        (self.rootfs / "bin" / "plain").write_text("text")
        (self.rootfs / "bin" / "plain").chmod(0o644)
        for command, code in (("/no/such", 127), ("nosuch", 127), ("/bin/plain", 126), ("/bin", 126)):
            container = self.monitored(command)
            with self.assertRaises(CannotRun) as caught:
                await self.conmon.create(container)
            self.assertEqual((caught.exception.exit_code, command), (code, command))
            self.assertTrue(str(caught.exception))
            await self.until(lambda id=container.id: self.gone(id), "nothing is left")

    async def test_a_configuration_that_crun_refuses_is_told_in_its_words(self) -> None:
        container = self.monitored("true")
        (container.bundle / "config.json").write_text('{"ociVersion": "1.0.0", "root": 5}')
        with self.assertRaises(CannotRun) as caught:
            await self.conmon.create(container)
        self.assertEqual(caught.exception.exit_code, 128)
        await self.until(lambda: self.gone(container.id), "nothing is left")

    async def test_memory_that_ran_out(self) -> None:
        # A shell that doubles a string allocates memory.
        made = await self.started("sh", "-c", 'x=xxxxxxxx; while :; do x="$x$x"; done', memory=24 * MIB)
        exit = await self.end(made)
        self.assertEqual((exit.code, exit.oom_killed), (137, True))

    async def test_who_killed_it_is_known_to_another_agent(self) -> None:
        greedy = "dd if=/dev/zero of=/dev/null bs=64M; exec sleep 600"
        made = await self.started("sh", "-c", greedy, memory=24 * MIB)
        assert made.watch is not None
        made.watch.close()
        status = self.crun.status(made.container.id)
        assert status is not None
        assert status.cgroup is not None
        await self.until(status.cgroup.oom_kills, "a process was killed for its memory")
        await self.conmon.kill(made.container)
        await self.until((made.container.bundle / "exit").exists, "it has ended")
        await self.until(lambda: start_ticks(made.process.conmon) == 0, "and so has conmon")
        exit = Conmon(reactor, self.crun, group=CONMONS).find(made.container)
        assert isinstance(exit, Exit)
        self.assertEqual((exit.code, exit.oom_killed), (137, False))

    async def test_conmon_is_protected_and_the_container_is_not(self) -> None:
        made = await self.started("sleep", "600", score=321)
        self.assertEqual(oom_score_adj(made.process.conmon), _lowest_score())
        await self.until(lambda: oom_score_adj(made.process.pid) == 321, "its score")
        groups = Path(f"/proc/{made.process.conmon}/cgroup").read_text()
        self.assertIn(f"/{CONMONS}/{made.container.id}", groups)

    async def test_a_container_is_started_once(self) -> None:
        made = await self.started("sleep", "600")
        with self.assertRaises(FailedPrecondition):
            await self.crun.start(made.container.id)
        with self.assertRaises(NotFound):
            await self.crun.start("0" * 32)

    async def test_where_crun_keeps_its_fifo_elsewhere_crun_starts_it(self) -> None:
        made = await self.created("sh", "-c", "exit 5")
        fifo = self.crun.root / made.container.id / "exec.fifo"
        fifo.rename(self.directory / "fifo")
        with self.assertRaises(FailedPrecondition):
            await self.crun.start(made.container.id)
        (self.directory / "fifo").rename(fifo)
        await self.crun.start(made.container.id)
        self.assertEqual((await self.end(made)).code, 5)

    async def test_limits_are_changed(self) -> None:
        made = await self.started("sleep", "600", memory=64 * MIB)
        await self.crun.update(made.container.id, {"memory": {"limit": 48 * MIB, "swap": 48 * MIB}})
        with self.assertRaises(InvalidArgument):
            await self.crun.update(made.container.id, {"cpu": {"cpus": "9999"}})

    async def test_a_killed_conmon_ends_its_container(self) -> None:
        made = await self.started("sleep", "600")
        os.kill(made.process.conmon, signal.SIGKILL)
        exit = await self.end(made)
        self.assertEqual((exit.code, exit.oom_killed), (137, False))
        self.assertIn("conmon", exit.message)
        await self.until(lambda: _state(made.process.pid) in "ZX", "the container has ended")

    async def test_of_one_whose_conmon_was_killed_another_agent_kills_what_is_left(self) -> None:
        made = await self.started("sleep", "600")
        assert made.watch is not None
        made.watch.close()
        os.kill(made.process.conmon, signal.SIGKILL)
        await self.until(lambda: _state(made.process.conmon) in "ZX", "its conmon has ended")
        exit = self.conmon.find(made.container)
        assert isinstance(exit, Exit)
        self.assertEqual(exit.code, 137)
        await self.until(lambda: _state(made.process.pid) in "ZX", "the container has ended")

    async def test_a_conmon_that_hangs_does_not_hide_its_containers_end(self) -> None:
        self.patch(conmons, "LAST_SECONDS", 0.5)
        made = await self.started("sleep", "600")
        os.kill(made.process.conmon, signal.SIGSTOP)
        os.kill(made.process.pid, signal.SIGKILL)
        exit = await self.end(made)
        self.assertEqual(exit.code, 137)
        self.assertIn("conmon", exit.message)

    async def test_another_agent_finds_it(self) -> None:
        running = await self.started("sleep", "600")
        ended = await self.started("sh", "-c", "exit 4")
        exit = await self.end(ended)
        waiting = await self.created("true")
        for made in (running, waiting):
            self.assertEqual(self.found(made.container.id), str(made.process))
        self.assertEqual(self.found(ended.container.id), str(exit))
        self.assertEqual(self.found("0" * 32), "None")
        again = self.conmon.find(waiting.container)
        assert isinstance(again, Process)
        exits: list[Exit] = []
        watch = self.conmon.watch(waiting.container, again, exits.append)
        self.addCleanup(watch.close)
        await self.crun.start(waiting.container.id)
        await self.until(lambda: exits, "its end is seen by the other too")
        self.assertEqual(exits[0].code, 0)

    def found(self, id: str) -> str:
        """Return the container's state as a new process finds it."""
        arguments = [id, str(self.directory / id), str(self.crun.root), self.program]
        command = [sys.executable, "-c", _FIND, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    async def test_the_end_is_told_also_when_it_was_long_ago(self) -> None:
        made = await self.created("sh", "-c", "exit 6")
        assert made.watch is not None
        made.watch.close()
        await self.crun.start(made.container.id)
        await self.until(lambda: (made.container.bundle / "exit").exists(), "it has ended")
        await self.until(lambda: _state(made.process.conmon) in "ZX", "and conmon")
        exits: list[Exit] = []
        watch = self.conmon.watch(made.container, made.process, exits.append)
        self.assertEqual(exits, [])
        await self.until(lambda: exits, "it is told")
        watch.close()
        self.assertEqual([exit.code for exit in exits], [6])
        self.assertEqual(made.exits, [])

    async def test_discarding_leaves_nothing(self) -> None:
        made = await self.started("sh", "-c", "sleep 600 & sleep 600")
        for _ in range(2):
            await self.conmon.discard(made.container)
        await self.until(lambda: self.gone(made.container.id), "all of it is gone")
        self.assertEqual(sorted(os.listdir(made.container.bundle)), ["config.json", "log"])

    async def test_a_crun_that_hangs_is_given_up(self) -> None:
        hanging = self.directory / "hanging"
        marker = str(800000 + os.getpid() % 100000)
        hanging.write_text(f"#!/bin/sh\nsleep {marker} & sleep {marker}\n")
        hanging.chmod(0o755)
        crun = Crun(reactor, self.directory / "run", str(hanging), 0.5)
        conmon = Conmon(reactor, crun, group=CONMONS, seconds=1.0)
        container = self.monitored("true")
        with self.assertRaises(Unavailable) as caught:
            await conmon.create(container)
        self.assertIn("crun", str(caught.exception))
        await self.until(lambda: self.gone(container.id), "nothing is left")
        made = await self.started("sleep", "600")
        for call in (crun.update(made.container.id, {}), crun.delete(made.container.id)):
            with self.assertRaises(Unavailable) as caught:
                await call
            self.assertIn(str(hanging), str(caught.exception))
        await self.until(lambda: not living("sleep", marker), "what they started has ended")

    async def test_what_is_left_in_its_cgroup_is_killed(self) -> None:
        left = subprocess.Popen(["sleep", "600"])
        self.addCleanup(left.wait)
        self.addCleanup(left.kill)
        path = f"{CONMONS}/left"
        cgroup.join(path, left.pid)
        await self.conmon._clear(path)
        self.assertFalse(cgroup.Cgroup(path).exists)
        self.assertEqual(left.wait(10), -signal.SIGKILL)

    async def test_a_creation_that_is_cancelled_leaves_nothing(self) -> None:
        for after in (0, 0.005, 0.02, 0.04, 0.08):
            container = self.monitored("true")
            creating = start(self.conmon.create(container))
            await sleep(reactor, after)
            creating.cancel()
            with contextlib.suppress(CancelledError):
                await creating  # unless it was created in time
                await self.conmon.discard(container)
            await self.until(lambda id=container.id: self.gone(id), "what was killed has ended")

    async def test_programs_that_are_not_there_are_named(self) -> None:
        container = self.monitored("true")
        for conmon, name in (
            (Conmon(reactor, self.crun, "no-conmon", group=CONMONS), "no-conmon"),
            (Conmon(reactor, Crun(reactor, self.crun.root, "no-crun")), "no-crun"),
        ):
            with self.assertRaises(FailedPrecondition) as caught:
                await conmon.create(container)
            self.assertIn(
                f"the program {name} is missing; install the packages crun and conmon", str(caught.exception)
            )

    async def test_a_conmon_that_hangs_is_given_up(self) -> None:
        container = self.monitored("true")
        hanging = self.directory / "hanging"
        hanging.write_text("#!/bin/sh\nexec sleep 600\n")
        hanging.chmod(0o755)
        conmon = Conmon(reactor, self.crun, str(hanging), group=CONMONS, seconds=0.3)
        for _ in range(2):
            with self.assertRaises(Unavailable) as caught:
                await conmon.create(container)
            self.assertIn("conmon and crun did not create it", str(caught.exception))
        await self.until(lambda: self.gone(container.id), "nothing is left")
        made = await self.started("true")  # a different container is not delayed
        self.assertEqual((await self.end(made)).code, 0)

    async def test_a_conmon_that_fails_says_why(self) -> None:
        container = self.monitored("true")
        failing = self.directory / "failing"
        failing.touch(0o755)
        for script, words in (
            ("echo no memory >&2", "conmon failed: no memory"),
            ("printf 'no \\377' >&2", "conmon failed: no \N{REPLACEMENT CHARACTER}"),
            ("pwd >&2", str(container.bundle)),
            ("echo $TMPDIR >&2", str(container.bundle)),
            ("env | grep -c HOME >&2", "0"),
            ("echo '{}' >&3", "without an error message"),
            ("echo '[]' >&3", "without an error message"),
            ("echo 'no json' >&3", "without an error message"),
            ('echo \'{"pid": "x"}\' >&3', "without an error message"),
            ("head -c 100000 /dev/zero | tr '\\0' x >&2", "x" * 65536),
        ):
            failing.write_text(f"#!/bin/sh\n{script}\nexit 1\n")
            with self.assertRaises(Unavailable) as caught:
                await Conmon(reactor, self.crun, str(failing), group=CONMONS).create(container)
            self.assertIn(words, str(caught.exception))
            self.assertLess(len(str(caught.exception)), 65536 + 100)

    async def test_one_that_creates_the_container_before_its_pid_is_written_down(self) -> None:
        """The process that was started does that, after it has forked the one that stays."""
        looked = self.directory / "looked"
        late = self.directory / "late"
        late.touch(0o755)
        late.write_text(
            "#!/bin/sh\n"
            "for each; do shift; case $each in\n"
            '--conmon-pidfile=*) file=${each#*=}; set -- "$@" "$each.early";;\n'
            '*) set -- "$@" "$each";; esac; done\n'
            'conmon "$@"\n'
            f"while [ ! -e {looked} ]; do sleep 0.01; done\n"
            'mv "$file.early" "$file"\n'
        )
        find = Conmon._process

        def process(conmon: Conmon, container: conmons.Monitored, pid: int) -> Process | None:
            found = find(conmon, container, pid)
            looked.touch()
            return found

        self.patch(Conmon, "_process", process)
        self.conmon = Conmon(reactor, self.crun, str(late), group=CONMONS)
        made = await self.started("sh", "-c", "exit 5")
        self.assertEqual((await self.end(made)).code, 5)

    async def test_what_conmon_says_may_have_any_character(self) -> None:
        container = self.monitored("true")
        failing = self.directory / "failing"
        failing.touch(0o755)
        said = r'{"pid": -1, "message": "no\t\377"}\n'
        failing.write_text(f"#!/bin/sh\nprintf '{said}' >&3\nsleep 600\n")
        with self.assertRaises(CannotRun) as caught:
            await Conmon(reactor, self.crun, str(failing), group=CONMONS).create(container)
        self.assertEqual(str(caught.exception), "no\t\N{REPLACEMENT CHARACTER}")

    async def test_where_it_can_have_no_cgroup_conmon_stays_in_the_agents(self) -> None:
        def fails(*_: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        self.patch(cgroup, "join", fails)
        with capturedLogs() as events:
            made = await self.started("sh", "-c", "exit 5")
        self.assertEqual(len(events), 1)
        self.assertEqual((await self.end(made)).code, 5)
        container = self.monitored("true")
        hanging = self.directory / "hanging"
        hanging.touch(0o755)
        hanging.write_text("#!/bin/sh\nwhile :; do sleep 0.1; done\n")
        with self.assertRaises(Unavailable):
            await Conmon(reactor, self.crun, str(hanging), group=CONMONS, seconds=0.3).create(container)
        await self.until(lambda: self.gone(container.id), "one that hangs is killed all the same")

    async def test_a_watch_that_is_closed_at_once_tells_nothing(self) -> None:
        made = await self.started("true")
        await self.end(made)
        exits: list[Exit] = []
        self.conmon.watch(made.container, made.process, exits.append).close()
        await sleep(reactor, 0)
        self.assertEqual(exits, [])

    async def test_what_crun_says_of_one_that_has_no_conmon_is_told_if_it_fails(self) -> None:
        program = self.directory / "program"
        program.touch(0o755)
        for code, expected in ((0, ""), (3, "no \N{REPLACEMENT CHARACTER} memory")):
            program.write_text(f"#!/bin/sh\nprintf 'no \\377 memory\\n'; exit {code}\n")
            crun = Crun(reactor, self.directory / "run", str(program))
            self.assertEqual(await crun.run("c1", self.directory), expected)


class MessageTests(SynchronousTestCase):
    def test_what_crun_says_has_an_exit_code(self) -> None:
        for message, code in (
            ("executable file `x` not found in $PATH: No such file or directory", 127),
            ("open executable: Permission denied", 126),
            ("exec: Exec format error", 126),
            ("the path `/etc/x` exists but it is not executable: Operation not permitted", 126),
            ("the path `/etc` is not a regular file: Operation not permitted", 126),
            ("mount `/x` to `y`: No such file or directory", 128),
        ):
            self.assertEqual(exit_code_of(message), code)


def _lowest_score() -> int:
    """Return the score of a process that asks for -1000; without the privilege it keeps the one it has."""
    script = "echo -1000 >/proc/self/oom_score_adj; cat /proc/self/oom_score_adj"
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False).stdout
    return int(said)


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _state(pid: int) -> str:
    """Return R, S, Z and so on, or X if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
