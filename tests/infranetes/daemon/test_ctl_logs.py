# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl logs` against a daemon as a process."""

from __future__ import annotations

import json
import subprocess

from twisted.internet.threads import deferToThread

from infranetes.ctl.cli import DONE, FAILED
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import ROOT
from tests.infranetes.daemon.ctl import CtlCase
from tests.support import warm


@needs_registry
class LogTests(CtlCase):
    async def test_a_containers_log_and_its_end(self) -> None:
        await self.start()
        sandbox = await self.run_pod("web")
        script = "for i in 1 2 3 4 5; do echo line $i; done; echo trouble >&2"
        container = await self.run_container(sandbox, self.box(script=script))
        await self.in_state(container, cri.CONTAINER_EXITED)
        lines = [f"line {number}" for number in range(1, 6)]
        self.assertEqual(sorted((await self.ctl("logs", "web")).splitlines()), [*lines, "trouble"])
        self.assertEqual(len((await self.ctl("logs", "default/web", "main", "--tail", "2")).splitlines()), 2)
        self.assertEqual(await self.ctl("logs", "web", "--tail", "0"), "")
        told = await self.json("logs", "web", container[:8])
        self.assertEqual(told["container"], {"id": container, "name": "main"})
        self.assertEqual(
            sorted((line["stream"], line["text"]) for line in told["lines"]),
            [("stderr", "trouble"), *(("stdout", line) for line in lines)],
        )
        followed = await self.ctl("logs", "web", "--follow", "--json")  # of a container that has exited
        self.assertEqual(len([json.loads(line) for line in followed.splitlines()]), 6)
        self.assertIn(
            "has no container other: it has main", await self.ctl("logs", "web", "other", code=FAILED)
        )
        await self.run_container(sandbox, self.box("side", script="sleep 600"))
        self.assertIn("say which of main, side", await self.ctl("logs", "web", code=FAILED))

        path = self.log_directory / "web" / "main.log"
        path.unlink()
        path.symlink_to("/etc/passwd")
        self.assertIn("no symbolic link", await self.ctl("logs", "web", "main", code=FAILED))

    @slow(4, "the daemon starts again meanwhile, and is waited for")
    async def test_it_is_followed_over_a_rotation_and_a_restart_until_the_container_ends(self) -> None:
        await self.start()
        sandbox = await self.run_pod("web")
        goes_on = self.root / "goes-on"
        wait = f"while [ ! -e {goes_on} ]; do sleep 0.1; done"
        script = f"echo line 0; {wait}; for i in 1 2 3 4 5; do echo line $i; sleep 0.2; done"
        container = await self.run_container(sandbox, self.box(script=script))
        config = str(self.root / "infranetes.toml")
        program = warm.command("-m", "infranetes.ctl.cli", "logs", "web", "-f", "--config", config)
        following = subprocess.Popen(program, stdout=subprocess.PIPE, cwd=ROOT, text=True)
        self.addCleanup(following.wait)
        self.addCleanup(following.kill)
        assert following.stdout is not None
        lines = following.stdout
        self.assertEqual(await deferToThread(lines.readline), "line 0\n")
        path = self.log_directory / "web" / "main.log"
        path.rename(path.with_suffix(".old"))
        await self.runtime.ReopenContainerLog(
            cri.ReopenContainerLogRequest(container_id=container), timeout=30.0
        )
        goes_on.touch()
        self.assertEqual(await deferToThread(lines.readline), "line 1\n")  # of the new file
        await self.restart()
        rest = await deferToThread(lines.read)
        self.assertEqual(rest.splitlines(), [f"line {number}" for number in range(2, 6)])
        self.assertEqual(await deferToThread(following.wait), DONE)
        lines.close()
