# SPDX-License-Identifier: Apache-2.0
"""What the tests of infranetes-ctl against a daemon share."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from typing import Any

from twisted.internet.threads import deferToThread

from infranetes.ctl.cli import DONE, ask, read, socket_of
from tests.infranetes.daemon.case import ROOT, DaemonCase, reactor
from tests.support import warm


class CtlCase(DaemonCase):
    """A daemon, and infranetes-ctl in this process or in one of its own."""

    async def ctl(self, *arguments: str, code: int = DONE) -> str:
        """Run infranetes-ctl. Return its standard output, or its standard error if there is none."""
        options = read(["--config", str(self.root / "infranetes.toml"), *arguments])
        out, words = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(words):
            self.assertEqual(await ask(reactor, socket_of(options), options), code)
        return out.getvalue() or words.getvalue()

    async def json(self, *arguments: str) -> Any:  # Any: JSON
        return json.loads(await self.ctl(*arguments, "--json"))

    async def command(self, *arguments: str, code: int = DONE) -> str:
        """The same in a process of its own."""
        return await self.command_of("infranetes.ctl.cli", *arguments, code=code)

    async def command_of(self, module: str, *arguments: str, code: int = DONE) -> str:
        """Run a module in a process of its own."""
        program = warm.command("-m", module, *arguments)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = await deferToThread(
            subprocess.run, program, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=100
        )
        self.assertEqual(done.returncode, code, f"{done.stdout}\n{done.stderr}")
        self.assertNotIn("Traceback", done.stderr)
        return str(done.stdout or done.stderr)
