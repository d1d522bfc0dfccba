# SPDX-License-Identifier: Apache-2.0
"""exec, attach and port-forward by crictl: Kubernetes' own client, the daemon, an agent, and a process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import termios
import threading
from pathlib import Path
from typing import Any

from twisted.internet.threads import deferToThread

from infranetes_common.wire import cri
from tests.contract.container_sessions import living
from tests.harness.durations import slow
from tests.harness.needs import needs_tools, repetitions
from tests.infranetes.daemon.case import ROOT, DaemonCase, reactor
from tests.infranetes.streaming.client import SpdyClient, connect, spdy_head
from txgrpc import Code

CRICTL = ROOT / "build" / "tools" / "crictl"
MIB = 1024 * 1024
STREAMED = repetitions(40, nightly=100) * MIB
BUFFERED = 512 * MIB  # more than the kernel's buffers of every connection on the way can hold
GROWTH = 16 * MIB  # what a session may hold on its way, and what the allocator keeps
SECONDS = 60.0


@needs_tools("crictl")
class CrictlCase(DaemonCase):
    """A daemon, and crictl to talk to it."""

    async def setUp(self) -> None:
        super().setUp()
        if not CRICTL.exists():
            self.fail(f"{CRICTL} is missing: make tools")
        await self.start()
        self.sandbox = await self.run_pod()

    def command(self, *words: str) -> list[str]:
        (self.root / "crictl.yaml").touch()
        address = f"unix://{self.socket}"
        return [str(CRICTL), "-c", str(self.root / "crictl.yaml"), "-r", address, "-i", address, *words]

    async def crictl(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run it to its end."""
        command = self.command(*words)
        running = deferToThread(
            subprocess.run, command, input=stdin, capture_output=True, timeout=SECONDS, check=False
        )
        return await running  # type: ignore[no-any-return]

    def started(self, *words: str, **streams: Any) -> subprocess.Popen[bytes]:
        """Run it beside the test."""
        process = subprocess.Popen(self.command(*words), **streams)

        def end() -> None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

        self.addCleanup(end)
        return process

    async def sleeper(self) -> str:
        return await self.run_container(self.sandbox, self.box(script="sleep 1000"))

    def peak(self) -> int:
        """The most memory that the daemon has had, bytes."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


class ExecTests(CrictlCase):
    """crictl exec."""

    async def test_output_and_exit_code(self) -> None:
        container = await self.sleeper()
        for transport in ("spdy", "websocket"):
            done = await self.crictl(
                "exec", "-s=false", "-r", transport, container, "sh", "-c", "echo out; echo err >&2; exit 3"
            )
            self.assertEqual(done.stdout, b"out\n", done.stderr)
            self.assertIn(b"err\n", done.stderr)
            self.assertIn(b"exit code 3" if transport == "spdy" else b"3", done.stderr)
            self.assertNotEqual(done.returncode, 0)

    async def test_a_pipe_into_a_command(self) -> None:
        container = await self.sleeper()
        data = os.urandom(300_000)
        done = await self.crictl("exec", "-s=false", "-i", container, "cat", stdin=data)
        self.assertTrue(done.stdout == data, (len(done.stdout), done.stderr))
        self.assertEqual(done.returncode, 0, done.stderr)

    async def test_a_terminal(self) -> None:
        container = await self.sleeper()
        master, slave = pty.openpty()
        self.addCleanup(os.close, master)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
        words = ("exec", "-s=false", "-it", container, "sh", "-c", "read x; stty size; exit 0")
        process = self.started(*words, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        os.set_blocking(master, False)
        said = b""

        def heard(words: bytes) -> bool:
            nonlocal said
            with contextlib.suppress(OSError):  # nothing to read, or crictl has ended
                said += os.read(master, 65536)
            return words in said

        await self.until(lambda: living("read x; stty size; exit 0", "-c"), "the command runs")
        await self.sleep(0.5)
        os.write(master, b"go\n")
        await self.until(lambda: heard(b"33 77"), "the terminal's size")
        await self.until(lambda: process.poll() is not None, "crictl ends")
        self.assertEqual(process.returncode, 0, said)

    async def test_a_client_that_vanishes_takes_its_command_along(self) -> None:
        container = await self.sleeper()
        marker = str(400000 + os.getpid() % 100000)
        process = self.started("exec", "-s=false", "-i", container, "sleep", marker, stdin=subprocess.PIPE)
        await self.until(lambda: [pid for pid in living("sleep", marker) if pid != process.pid], "it runs")
        process.send_signal(signal.SIGKILL)
        process.wait()
        await self.until(lambda: not living("sleep", marker), "it is killed")

    async def test_a_daemon_that_ends_or_is_killed_takes_its_sessions_along(self) -> None:
        container = await self.sleeper()
        await self.ended_by(signal.SIGTERM, container)
        await self.start()
        await self.in_state(container, cri.CONTAINER_RUNNING)
        await self.ended_by(signal.SIGKILL, container)

    async def ended_by(self, number: signal.Signals, container: str) -> None:
        marker = str(500000 + os.getpid() % 100000 * 2 + (number is signal.SIGKILL))
        client = self.started("exec", "-s=false", "-i", container, "sleep", marker, stdin=subprocess.PIPE)
        await self.until(lambda: set(living("sleep", marker)) - {client.pid}, "it runs")
        assert self.process is not None
        self.process.send_signal(number)
        await self.ended(20.0)
        await self.until(lambda: client.poll() is not None, "crictl learns it")
        await self.until(lambda: not living("sleep", marker), "the command is killed")

    async def test_an_agent_that_is_lost_ends_the_session_with_a_word(self) -> None:
        container = await self.sleeper()
        client = self.started(
            "exec", "-s=false", "-i", container, "cat", stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        await self.until(lambda: living("cat"), "it runs")
        vm = (await self.vms())[0]
        await self.farm("behave", id=vm["id"], behaviour="no-agent", after=0)
        await self.until(lambda: client.poll() is not None, "crictl learns it")
        assert client.stderr is not None
        self.assertTrue(client.stderr.read().strip())
        self.assertNotEqual(client.returncode, 0)

    async def test_an_address_that_is_taken_is_told_at_the_start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            self.config["streaming"] = {"port": port}
            await self.kill()
            self.process = self.spawn()
            self.assertNotEqual(await self.ended(), 0)
        self.assertIn(f"127.0.0.1:{port} can't be listened on", self.log)

    @slow(4, "more is streamed than a session may keep, and nobody reads for a while")
    async def test_much_output_costs_the_daemon_no_memory(self) -> None:
        container = await self.sleeper()
        words = ("exec", "-s=false", container, "head", "-c", str(STREAMED), "/dev/zero")
        await self.crictl("exec", "-s=false", container, "head", "-c", str(MIB), "/dev/zero")
        before = self.peak()
        process = self.started(*words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        await self.sleep(2.0)  # nobody reads: all stand still
        self.assertLess(self.peak() - before, GROWTH)
        assert process.stdout is not None
        output = await deferToThread(process.stdout.read)
        self.assertEqual(len(output), STREAMED)
        self.assertLess(self.peak() - before, GROWTH)

    async def test_much_input_costs_the_daemon_no_memory(self) -> None:
        container = await self.sleeper()
        before = self.peak()
        words = ("exec", "-s=false", "-i", container, "sh", "-c", "sleep 2; wc -c")
        done = await self.crictl(*words, stdin=bytes(STREAMED))
        self.assertEqual(done.stdout.strip(), b"%d" % STREAMED, done.stderr)
        self.assertLess(self.peak() - before, GROWTH)

    async def test_only_in_a_container_that_runs(self) -> None:
        ended = await self.run_container(self.sandbox, self.box("ended", script="true"))
        await self.in_state(ended, cri.CONTAINER_EXITED)
        exec_ = cri.ExecRequest(container_id=ended, cmd=["true"], stdout=True)
        await self.refused(Code.FAILED_PRECONDITION, self.runtime.Exec(exec_, timeout=10.0))
        attach = cri.AttachRequest(container_id=ended, stdout=True)
        await self.refused(Code.FAILED_PRECONDITION, self.runtime.Attach(attach, timeout=10.0))
        exec_.container_id = attach.container_id = "0" * 32
        await self.refused(Code.NOT_FOUND, self.runtime.Exec(exec_, timeout=10.0))
        await self.refused(Code.NOT_FOUND, self.runtime.Attach(attach, timeout=10.0))
        nothing = cri.ExecRequest(container_id=await self.sleeper(), cmd=["true"])
        await self.refused(Code.INVALID_ARGUMENT, self.runtime.Exec(nothing, timeout=10.0))

    async def test_a_container_that_ends_before_the_url_is_fetched(self) -> None:
        container = await self.sleeper()
        request = cri.ExecRequest(container_id=container, cmd=["true"], stdout=True)
        url = (await self.runtime.Exec(request, timeout=10.0)).url
        self.assertRegex(url, r"\Ahttp://127\.0\.0\.1:\d+/exec/\S+\Z")
        await self.runtime.StopContainer(cri.StopContainerRequest(container_id=container), timeout=20.0)
        client = await connect(reactor, url, SpdyClient(), spdy_head("v4.channel.k8s.io"))
        self.addCleanup(client.transport.abortConnection)
        error = client.open(streamtype="error")
        client.open(streamtype="stdout")
        await client.until(lambda: error in client.finished)
        self.assertIn(b"not running", bytes(client.data[error]))


class AttachTests(CrictlCase):
    """crictl attach."""

    async def test_both_ways_and_detached_it_goes_on(self) -> None:
        script = "while read x; do echo got $x; done"
        container = await self.run_container(self.sandbox, self.box(script=script, stdin=True))
        for number in range(2):
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = self.started("attach", "-i", container, **streams)
            assert process.stdin is not None and process.stdout is not None
            await self.sleep(1.0)  # until it is attached: what comes before is not for it
            process.stdin.write(b"%d\n" % number)
            process.stdin.flush()
            line = await deferToThread(process.stdout.readline)
            self.assertEqual(line, b"got %d\n" % number)
            process.send_signal(signal.SIGKILL)
            process.wait()
        self.assertEqual((await self.container_status(container)).state, cri.CONTAINER_RUNNING)

    async def test_it_ends_with_the_container(self) -> None:
        container = await self.run_container(self.sandbox, self.box(script="sleep 2; echo bye"))
        done = await self.crictl("attach", container)
        self.assertEqual((done.stdout, done.returncode), (b"bye\n", 0), done.stderr)

    @slow(5, "more is streamed than a session may keep")
    async def test_much_output_costs_the_daemon_no_memory(self) -> None:
        """A MiB each time that one is asked for: a simulated container's log, which is what is attached to,
        keeps no more than a few of those that nobody has read."""
        script = f"while read x; do head -c {MIB - 1} /dev/zero | tr '\\0' a; echo; done"
        container = await self.run_container(self.sandbox, self.box(script=script, stdin=True))
        before = self.peak()
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = self.started("attach", "-i", container, **streams)
        assert process.stdin is not None and process.stdout is not None
        await self.sleep(1.0)  # until it is attached: what comes before is not for it
        for _ in range(STREAMED // MIB):
            process.stdin.write(b"more\n")
            process.stdin.flush()
            self.assertEqual(len(await deferToThread(process.stdout.read, MIB)), MIB)
        self.assertLess(self.peak() - before, GROWTH)


class Echo(threading.Thread):
    """A listener in the pod, which simulated machines share with this one: gives back what it gets."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.serving: list[tuple[threading.Thread, socket.socket]] = []

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self.serve, args=(connection,), daemon=True)
            self.serving.append((thread, connection))
            thread.start()

    def serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End every connection and thread; closing a socket would not wake who waits for it."""
        self.listening.shutdown(socket.SHUT_RDWR)
        self.join(SECONDS)
        self.listening.close()
        for thread, connection in self.serving:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(SECONDS)
            connection.close()


class PortForwardTests(CrictlCase):
    """crictl port-forward."""

    async def forwarded(self, port: int, transport: str = "spdy") -> int:
        """The local port from which crictl forwards to the pod's `port`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            local = int(probe.getsockname()[1])
        words = ("port-forward", "-r", transport, self.sandbox, f"{local}:{port}")
        self.started(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", local)) == 0

        await self.until(listens, "crictl forwards")
        return local

    def echo(self) -> int:
        echo = Echo()
        self.addCleanup(deferToThread, echo.stop)
        echo.start()
        return int(echo.port)

    async def test_connections_side_by_side(self) -> None:
        for transport in ("spdy", "websocket"):
            local = await self.forwarded(self.echo(), transport)
            every = [socket.create_connection(("127.0.0.1", local), SECONDS) for _ in range(10)]
            for number, connection in enumerate(every):
                await deferToThread(connection.sendall, b"%d" % number)
            for number, connection in enumerate(every):
                with connection:
                    self.assertEqual(await deferToThread(connection.recv, 100), b"%d" % number)

    @slow(5, "more is streamed than a session may keep")
    async def test_much_both_ways_costs_the_daemon_no_memory(self) -> None:
        local = await self.forwarded(self.echo())
        before = self.peak()
        sent, goal = 0, BUFFERED
        with socket.create_connection(("127.0.0.1", local), SECONDS) as connection:

            def send() -> None:
                nonlocal sent
                while sent < goal:
                    connection.sendall(bytes(MIB))
                    sent += MIB

            def receive() -> int:
                size = 0
                while size < goal and (data := connection.recv(MIB)):
                    size += len(data)
                return size

            sending = deferToThread(send)
            moved = -1
            while moved != sent:  # nobody reads what comes back: in the end all stand still
                moved = sent
                await self.sleep(2.0)
            if sending.called:
                await sending
            self.assertLess(sent, BUFFERED)
            self.assertLess(self.peak() - before, GROWTH)
            goal = max(sent + MIB, STREAMED)  # one piece is under way
            self.assertEqual(await deferToThread(receive), goal)
            await sending
        self.assertLess(self.peak() - before, GROWTH)

    async def test_a_port_where_nothing_listens_ends_only_its_own_connection(self) -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            local = await self.forwarded(nobody.getsockname()[1])
            with socket.create_connection(("127.0.0.1", local), SECONDS) as connection:
                self.assertEqual(await deferToThread(connection.recv, 100), b"")
        self.assertTrue(self.alive)
        await self.sleeper()

    async def test_only_a_sandbox_that_is_ready(self) -> None:
        unknown = cri.PortForwardRequest(pod_sandbox_id="0" * 32, port=[80])
        await self.refused(Code.NOT_FOUND, self.runtime.PortForward(unknown, timeout=10.0))
        await self.stop_pod(self.sandbox)
        stopped = cri.PortForwardRequest(pod_sandbox_id=self.sandbox, port=[80])
        await self.refused(Code.FAILED_PRECONDITION, self.runtime.PortForward(stopped, timeout=10.0))
