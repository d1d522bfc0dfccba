# SPDX-License-Identifier: Apache-2.0
"""On SIGHUP the configuration is reloaded, without ending the daemon or a pod."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from infranetes_common.wire import cri
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase
from tests.support.oci import busybox
from tests.support.registry import Registry
from tests.support.waiting import listens
from txgrpc import Code


def catches_hangups(pid: int) -> bool:
    """Return whether the process has a handler for SIGHUP (proc(5))."""
    caught = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")
    )
    return bool(int(caught.split()[1], 16) & 1 << (signal.SIGHUP - 1))


@needs_registry
class ReloadTests(DaemonCase):
    """The daemon as a process is asked to reload."""

    def setUp(self) -> None:
        super().setUp()
        self.config["log"] = {"level": "info"}

    async def reload(self, words: str) -> str:
        """Send SIGHUP with the current configuration. Return the log since then, once it contains `words`."""
        (self.root / "infranetes.toml").write_text(self.written())
        return await self.hang_up(words)

    async def hang_up(self, words: str) -> str:
        said = len(self.log)
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)
        await self.until(lambda: not self.alive or words in self.log[said:], words)
        self.assertTrue(self.alive, self.log[said:])
        return self.log[said:]

    async def test_the_level_of_the_log_changes_while_pods_run(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script="sleep 1000"))
        for level, seen in (("debug", True), ("warn", False), ("debug", True)):
            self.config["log"]["level"] = level
            await self.reload("read again: log.level is in force")
            said = len(self.log)
            await self.containers()
            self.assertEqual(" debug " in self.log[said:], seen, self.log[said:])
        self.assertEqual((await self.container_status(container)).state, cri.CONTAINER_RUNNING)
        self.assertEqual([one.id for one in await self.sandboxes()], [sandbox])

    async def test_a_flag_wins_still(self) -> None:
        await self.start("--log-level", "info")
        self.config["log"]["level"] = "error"
        await self.reload("read again: nothing has changed")

    async def test_drop_ins_are_read_again_too(self) -> None:
        await self.start()
        drop_in = self.root / "infranetes.toml.d" / "10-log.toml"
        drop_in.parent.mkdir()
        drop_in.write_text('log.level = "debug"\n')
        await self.hang_up("read again: log.level is in force")
        drop_in.write_text("[providers.simulated]\nboots = 1\n")
        await self.hang_up(f"everything stays as it was: {drop_in}: providers.simulated.boots: ")
        drop_in.unlink()
        await self.hang_up("read again: log.level is in force")

    async def test_keys_that_need_a_restart_are_told_one_by_one(self) -> None:
        await self.start()
        self.config["times"] = {"sweep": 30.0}
        self.config["providers"]["simulated"]["boot_seconds"] = 0.06
        for _ in range(2):  # it is logged at each reload
            said = await self.reload("read again: ")
            for key in ("times.sweep", "providers.simulated.boot_seconds"):
                lines = [line for line in said.splitlines() if f"infranetes.toml: {key} has changed" in line]
                self.assertEqual(len(lines), 1, said)
                self.assertIn("restart", lines[0])
                self.assertIn(" warn ", lines[0])
            self.assertEqual(said.count("has changed:"), 2, said)
        del self.config["times"]
        self.config["providers"]["simulated"]["boot_seconds"] = 0.05
        self.assertNotIn("has changed:", await self.reload("nothing has changed"))

    async def test_a_file_that_is_wrong_changes_nothing(self) -> None:
        await self.start()
        file = self.root / "infranetes.toml"
        level = 'log = { level = "error" }\n'
        for text, words in (
            ("socket = ", "not TOML"),
            (level + "sockett = 1\n", "infranetes.toml: sockett: not known"),
            ('log = { level = "loud" }\n', "infranetes.toml: log.level: "),
            (
                level + '[providers.simulated]\nboots = 1\nvms = "x"\n',
                "infranetes.toml: providers.simulated.boots: ",
            ),
            (level + 'provider = "nobody"\n', "infranetes.toml: provider: no provider is called 'nobody'"),
            (level + '[images]\npinned = ["::"]\n', "infranetes.toml: images.pinned: "),
        ):
            with self.subTest(text):
                provider = "" if "provider =" in text else 'provider = "simulated"\n'
                directories = f'state_dir = "{self.root}/state"\nrun_dir = "{self.root}/run"\n'
                file.write_text(directories + provider + text)
                said = await self.hang_up(words)
                self.assertIn("everything stays as it was", said)
                self.assertNotIn("Traceback", said)
                self.assertNotIn("\\n", said)
        file.unlink()
        self.assertIn("can't be read", await self.hang_up("everything stays as it was"))
        # The log level is unchanged: a line at level info is written.
        self.assertIn(" info ", await self.reload("read again: nothing has changed"))

    async def test_the_pool_becomes_what_the_file_says(self) -> None:
        await self.start()
        for count in (2, 1, 0):
            self.config["pool"] = {"sizes": [{"count": count}]}
            path = self.root / "infranetes.toml"
            path.write_text(self.written().replace('"count": ', "count = "))
            await self.hang_up("read again: pool.sizes is in force")
            until = time.monotonic() + 100
            while len(await self.vms()) != count:
                self.assertLess(time.monotonic(), until, self.log[-3000:])
                await self.sleep(0.05)

    async def test_one_that_is_killed_right_after_is_followed_by_one_that_has_it_all(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        text = self.written() + "\n[[pool.sizes]]\ncount = 2\n"
        (self.root / "infranetes.toml").write_text(text)
        await self.hang_up("read again: pool.sizes is in force")
        await self.kill()
        self.written = lambda: text  # type: ignore[method-assign]
        await self.start()
        until = time.monotonic() + 100
        while len(await self.vms()) != 3:
            self.assertLess(time.monotonic(), until, self.log[-3000:])
            await self.sleep(0.05)
        self.assertEqual([one.id for one in await self.sandboxes()], [sandbox])

    async def test_pulls_take_the_policy_and_the_credentials_of_the_moment(self) -> None:
        registry = Registry().start()
        self.addCleanup(registry.stop)
        reference = registry.push("other", "latest", busybox())
        self.config["images"] = {"insecure_registries": [registry.host]}
        await self.start()
        request = cri.PullImageRequest(image=cri.ImageSpec(image=reference))
        await self.image_service.PullImage(request, timeout=60.0)
        (self.root / "policy.json").write_text('{"default": [{"type": "reject"}]}')
        self.config["images"]["policy"] = str(self.root / "policy.json")
        self.config["images"]["auth_file"] = str(self.root / "auth.json")
        (self.root / "auth.json").write_text('{"auths": {}}')
        self.assertIn("images.auth_file", await self.reload("images.policy are in force"))
        await self.image_service.RemoveImage(
            cri.RemoveImageRequest(image=cri.ImageSpec(image=reference)), timeout=20.0
        )
        words = await self.refused(
            Code.PERMISSION_DENIED, self.image_service.PullImage(request, timeout=60.0)
        )
        self.assertIn("policy", words)
        del self.config["images"]["policy"]
        await self.reload("images.policy is in force")
        await self.image_service.PullImage(request, timeout=60.0)

    async def test_many_at_once(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        assert self.process is not None
        for _ in range(200):
            self.process.send_signal(signal.SIGHUP)
        await self.hang_up("read again")
        self.assertEqual([one.id for one in await self.sandboxes()], [sandbox])

    async def test_while_it_starts_it_is_done_once_it_can_be(self) -> None:
        self.config["log"]["level"] = "warn"
        self.process = self.spawn()
        pid = self.process.pid
        await self.until(lambda: not self.alive or catches_hangups(pid), "a handler for SIGHUP")
        self.config["log"]["level"] = "info"
        await self.reload("read again: log.level is in force")
        await self.connect()

    async def test_while_it_ends_it_ends(self) -> None:
        for pause in (0.0, 0.05, 0.3):
            await self.start()
            assert self.process is not None
            self.process.terminate()
            await self.sleep(pause)
            for _ in range(50):
                if self.alive:
                    self.process.send_signal(signal.SIGHUP)
                    await self.sleep(0.002)
            status = await self.ended()
            self.assertIn(status, (0, -signal.SIGTERM), self.log)  # depends on Twisted's release
            self.assertNotIn("Traceback", self.log)
            self.assertFalse(self.socket.exists())


@needs_registry
class ManagerTests(DaemonCase):
    """What the daemon notifies systemd of (sd_notify(3))."""

    def said(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self.manager.recv(4096).decode())
            except BlockingIOError:
                return found

    async def test_a_reload_has_a_beginning_and_an_end(self) -> None:
        path = str(self.root / "notify")
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(self.manager.close)
        self.manager.bind(path)
        self.manager.setblocking(False)
        self.environment["NOTIFY_SOCKET"] = path
        await self.start()
        self.said()
        assert self.process is not None
        for text, status in (
            (self.written(), "STATUS=serving"),
            ("sockett = 1\n", "STATUS=serving; the configuration was not reloaded: "),
        ):
            (self.root / "infranetes.toml").write_text(text)
            before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            self.process.send_signal(signal.SIGHUP)
            told = self.said()
            while len(told) < 2:
                await self.sleep(0.03)  # trial's timeout ends this
                told += self.said()
            begin = dict(line.split("=", 1) for line in told[0].splitlines())
            self.assertEqual(begin["RELOADING"], "1")
            self.assertGreaterEqual(int(begin["MONOTONIC_USEC"]), before)
            end = told[1].splitlines()
            self.assertEqual(end[0], "READY=1")
            self.assertTrue(end[1].startswith(status), end)

    async def test_one_that_is_not_ready_yet_does_not_say_that_it_is(self) -> None:
        path = str(self.root / "notify")
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(self.manager.close)
        self.manager.bind(path)
        self.manager.setblocking(False)
        self.environment["NOTIFY_SOCKET"] = path
        fifo = self.root / "never"
        os.mkfifo(fifo)
        farm: dict[str, Any] = {"farm_command": ["/bin/sh", "-c", f"read x < {fifo}"]}
        self.config["providers"] = {"simulated": farm}
        self.process = self.spawn()
        await self.until(lambda: listens(self.socket), "the socket")
        self.process.send_signal(signal.SIGHUP)
        await self.until(lambda: "read again" in self.log, "a reload")
        self.assertEqual([each for each in self.said() if "READY" in each or "RELOADING" in each], [])
