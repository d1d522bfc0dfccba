# SPDX-License-Identifier: Apache-2.0
"""docs/crictl.md, typed as it stands: each command of the page, one after the other, in a shell."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator

from twisted.internet.threads import deferToThread

from tests.docs.test_examples import TREE, blocks
from tests.harness.durations import slow
from tests.harness.needs import needs_tools
from tests.interop.test_crictl import CRICTL, CrictlCase
from tests.support.oci import busybox
from tests.support.registry import Registry

PAGE = TREE / "docs" / "crictl.md"
IMAGE = "docker.io/library/busybox:latest"
# These go on until somebody presses Ctrl-C; here that is at the end of the page.
ENDLESS = re.compile(r"crictl (events|attach|port-forward|logs -f)\b")
SECONDS = 90.0
PRELUDE = """\
set -euo pipefail
crictl() { command crictl --config "$CONFIG" "$@"; }
curl() { command curl --silent --show-error --fail --retry 30 --retry-delay 1 --retry-all-errors "$@"; }
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def commands(page: str) -> Iterator[str]:
    """The lines that a person types."""
    for block in blocks(page):
        if not block.startswith(("{", "runtime-endpoint:")):
            yield from filter(None, block.splitlines())


@slow(6, "each of a page's commands is a process")
@needs_tools("crictl")
class PageTests(CrictlCase):
    """Over simulated machines, whose containers are processes of this one."""

    async def test_every_command_works_as_it_is_written(self) -> None:
        page = PAGE.read_text()
        self.config["images"] = {}
        registry = await deferToThread(Registry().start)
        self.addCleanup(registry.stop)
        reference = await deferToThread(registry.push, "library/busybox", "latest", busybox())
        self.config["images"] = {"insecure_registries": [registry.host]}
        await self.start()
        ports = {"8080": str(free_port()), "80": str(free_port())}
        here = self.root / "typed"
        here.mkdir()

        def adapted(text: str) -> str:
            text = text.replace(IMAGE, reference).replace("/var/log/pods", str(self.log_directory))
            text = re.sub(r"\b(8080|80)\b(?![.\d]*m)", lambda found: ports[found[1]], text)
            return text.replace("/www", str(self.root / "www"))

        names = re.findall(r"`([a-z]+\.json)`", page)
        objects = [block for block in blocks(page) if block.startswith("{")]
        for name, block in zip(dict.fromkeys(names), objects, strict=True):
            json.loads(block)
            (here / name).write_text(adapted(block))
        script = [PRELUDE]
        for command in commands(page):
            line = adapted(command)
            if ENDLESS.search(line):
                line += " &"
            elif "-it" in line:
                line = line.replace("-it", "-i") + " </dev/null"  # no terminal here
            script += [f"echo {json.dumps('$ ' + command).replace('$', chr(92) + '$')}", line]
        script.append("kill $(jobs -p) 2>/dev/null || true")
        (here / "script").write_text("\n".join(script) + "\n")
        environment = {
            **os.environ,
            "PATH": f"{CRICTL.parent}:{os.environ['PATH']}",
            "CONFIG": str(self.root / "crictl.yaml"),
        }
        said = here / "said"
        with said.open("wb") as output:
            running = subprocess.Popen(
                ["bash", "script"],
                cwd=here,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            with contextlib.suppress(self.failureException):
                await self.until(lambda: running.poll() is not None, "the end of the page", SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        words = said.read_text(errors="replace")
        self.assertEqual(running.returncode, 0, f"{words[-3000:]}\n{self.log[-1000:]}")
        self.assertEqual(await self.sandboxes(), [])  # the page ends what it began
        self.assertIn("hello", words)
