# SPDX-License-Identifier: Apache-2.0
"""If the daemon can't start, it says why in one line, and its exit status is not 0."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
from pathlib import Path

from infranetes.pods.store.store import FILE
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase, toml


@needs_registry
class StartTests(DaemonCase):
    """Starts that fail, and starts that could be expected to fail."""

    async def refused_start(self, words: str, *flags: str) -> None:
        """Check that the daemon ends by itself with `words` in its last line, and without a traceback."""
        said = len(self.log) if (self.root / "daemon.log").exists() else 0
        self.process = self.spawn(*flags)
        status = await self.ended()
        fresh = self.log[said:]
        self.assertNotEqual(status, 0, fresh)
        self.assertNotIn("Traceback", fresh)
        self.assertEqual([line for line in fresh.splitlines() if words in line][1:], [], fresh)
        self.assertIn(words, fresh)
        self.process = None

    async def test_configurations_that_are_wrong(self) -> None:
        good = dict(self.config)
        for change, words in (
            ({"sockett": "/x"}, "infranetes.toml: sockett:"),
            ({"socket": 7}, "infranetes.toml: socket:"),
            ({"socket": "relative"}, "socket: 'relative' is not an absolute path"),
            ({"socket": "/" + "x" * 200}, "too long for a socket"),
            ({"provider": "nobody"}, "infranetes.toml: provider: no provider is called 'nobody'"),
            (
                {"providers": {"simulated": {"boot_secs": 1}}},
                "infranetes.toml: providers.simulated.boot_secs: ",
            ),
            ({"log": {"level": "loud"}}, "log.level"),
            ({"times": {"launch": -1.0}}, "times.launch"),
            (
                {"images": {"insecure_registries": ["http://x/"]}},
                "infranetes.toml: images.insecure_registries: ",
            ),
        ):
            self.config = {**good, **change}
            await self.refused_start(words)
        self.config = good
        await self.refused_start("log.format", "--log-format", "xml")
        await self.refused_start("no provider is called 'none'", "--podprovider", "none")
        await self.refused_start("can't be read", "--config", str(self.root / "missing.toml"))
        (self.root / "broken.toml").write_text("socket = ")
        await self.refused_start("not TOML", "--config", str(self.root / "broken.toml"))

    async def test_a_socket_that_is_in_use(self) -> None:
        self.socket.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(self.socket))
            other.listen()
            await self.refused_start("another program listens there")
        self.assertTrue(self.socket.exists())
        await self.start()  # what the failed start has left does not matter

    async def test_a_socket_path_that_is_something_else(self) -> None:
        self.socket.parent.mkdir()
        self.socket.write_text("precious")
        await self.refused_start("is no socket")
        self.assertEqual(self.socket.read_text(), "precious")

    async def test_a_second_daemon_over_the_same_state(self) -> None:
        await self.start()
        first = self.process
        assert first is not None
        await self.refused_start(f"another infranetes daemon (pid {first.pid})", "--listen", f"{self.root}/2")
        self.process = first
        await self.run_pod()

    async def test_in_the_background(self) -> None:
        """With twistd's own way to detach, errors are printed before the command returns."""
        self.cold = True
        pid_file = self.root / "pid"
        self.process = self.spawn(background=str(pid_file))
        self.assertEqual(await self.ended(), 0, self.log)
        await self.until(pid_file.exists, "a pid file")
        pid = int(pid_file.read_text())
        self.addCleanup(self.kill_if_there, pid)
        self.assertEqual(int((self.root / "state" / "lock").read_text()), pid)
        self.process = self.spawn(background=str(self.root / "other"))
        self.assertEqual(await self.ended(), 1)
        self.assertIn(f"another infranetes daemon (pid {pid})", self.log)
        os.kill(pid, signal.SIGTERM)
        await self.until(lambda: not Path(f"/proc/{pid}").exists(), "the daemon ends")
        self.assertFalse(self.socket.exists())

    def kill_if_there(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    async def test_a_store_that_is_broken_or_another_releases(self) -> None:
        file = self.root / "state" / FILE
        file.parent.mkdir(parents=True)
        file.write_bytes(b"no database at all" * 1000)
        await self.refused_start(str(file))
        file.unlink()
        with sqlite3.connect(file) as store:
            store.execute("PRAGMA user_version = 1000")
        store.close()
        await self.refused_start("install the release that wrote it")

    async def test_a_state_directory_that_is_a_file(self) -> None:
        (self.root / "file").write_text("")
        self.config["state_dir"] = str(self.root / "file")
        await self.refused_start(str(self.root / "file"))

    async def test_a_provider_that_can_not_start(self) -> None:
        self.config["providers"] = {"simulated": {"farm_command": ["/bin/false"]}}
        self.constants = {"infranetes_simulation.provider.farm_client.FarmClient.start_seconds": 0.5}
        self.process = self.spawn()
        status = await self.ended()
        self.assertEqual(status, 1)
        self.assertIn("infranetes can't start", self.log)
        self.assertNotIn("Traceback", self.log)

    async def test_a_failure_late_in_the_start_stops_what_has_started(self) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            self.config["streaming"] = {"port": port}
            await self.refused_start(f"streaming.host, streaming.port: 127.0.0.1:{port} can't be listened on")
        self.assertFalse(self.socket.exists())
        await self.start()

    async def test_terminated_while_it_starts(self) -> None:
        lock = self.root / "state" / "lock"
        for _ in range(3):
            lock.unlink(missing_ok=True)
            process = self.process = self.spawn()
            await self.until(lambda: lock.exists() and lock.read_text() != "", "the start has begun")
            process.terminate()
            self.assertIn(await self.ended(), (0, -signal.SIGTERM), self.log)  # depends on Twisted's release
            self.assertNotIn("Traceback", self.log)
            self.assertNotIn("can't start", self.log)
        self.process = None
        await self.start()

    async def test_flags_override_the_file(self) -> None:
        self.socket = Path(self.root, "other", "o.sock")
        await self.start("--listen", f"unix://{self.socket}", "--log-format", "json", "--log-level", "info")
        lines = [json.loads(line) for line in self.log.splitlines()]
        ready = [line["message"] for line in lines if "is ready on" in line["message"]]
        self.assertEqual(
            ready, [f"infranetes is ready on unix://{self.socket} (provider simulated, 0 sandboxes)"]
        )

    async def test_systemd_is_told_when_it_is_ready(self) -> None:
        path = str(self.root / "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(path)
            manager.setblocking(False)
            self.environment["NOTIFY_SOCKET"] = path
            await self.start()
            said = []
            while True:
                try:
                    said.append(manager.recv(4096).decode())
                except BlockingIOError:
                    break
            self.assertTrue(any("READY=1" in each for each in said), said)
            assert self.process is not None
            self.process.terminate()
            await self.ended()
            self.assertIn("STOPPING=1", manager.recv(4096).decode())

    async def test_the_file_is_what_a_person_writes(self) -> None:
        self.assertIn("[providers.simulated]\nboot_seconds = 0.05", toml(self.config))
