# SPDX-License-Identifier: Apache-2.0
"""infranetes-ctl config show and crictl info against a daemon as a process."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from typing import Any

from infranetes.config.schema import CONTROL_SOCKET
from infranetes.ctl.cli import DONE, ask, parser, socket_of
from infranetes_common.wire import cri
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase, reactor


@needs_registry
class ConfigTests(DaemonCase):
    @property
    def file(self) -> str:
        return str(self.root / "infranetes.toml")

    async def show(self, *arguments: str) -> str:
        control = str(self.root / "run" / CONTROL_SOCKET)  # a faulty file can't tell where the socket is
        options = parser().parse_args(["config", "show", *arguments, "--socket", control])
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(await ask(reactor, socket_of(options), options), DONE)
        return out.getvalue()

    async def keys(self) -> dict[str, Any]:  # Any: JSON
        found = json.loads(await self.show("--json"))
        self.assertEqual(found["files"][0], self.file)
        return {each["key"]: each for each in found["keys"]}

    def line(self, words: str) -> int:
        """Return the number of the first line of the file that begins with these words."""
        lines = self.written().splitlines()
        return next(number for number, line in enumerate(lines, start=1) if line.startswith(words))

    async def reload(self, words: str) -> None:
        (self.root / "infranetes.toml").write_text(self.written())
        said = len(self.log)
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)
        await self.until(lambda: not self.alive or words in self.log[said:], words)

    async def test_values_and_where_they_are_from(self) -> None:
        await self.start("--log-format", "json", "--cluster", "c")
        keys = await self.keys()
        for key, value, source in (
            ("cluster", "c", "command line"),
            ("log.format", "json", "command line"),
            ("provider", "simulated", "file"),
            ("providers.simulated.boot_seconds", 0.05, "file"),
            ("providers.simulated.capacity", 0, "default"),
            ("times.launch", 600.0, "default"),
            ("images.insecure_registries", [], "default"),
        ):
            self.assertEqual((keys[key]["value"], keys[key]["from"]), (value, source), key)
        found = keys["providers.simulated.boot_seconds"]
        self.assertEqual((found["file"], found["line"]), (self.file, self.line("boot_seconds")))
        text = await self.show()
        self.assertRegex(text, r"(?m)^cluster +\"c\" +command line$")
        self.assertRegex(text, rf"(?m)^provider +\"simulated\" +{self.file}:{self.line('provider')}$")
        self.assertRegex(text, r"(?m)^times.launch +600.0 +default$")
        self.assertNotIn("AFTER A RESTART", text)

    async def test_after_a_reload_what_is_in_force_and_what_waits(self) -> None:
        self.config["log"] = {"level": "info"}
        await self.start()
        self.config["log"] = {"level": "debug"}
        self.config["times"] = {"sweep": 30.0}
        await self.reload("log.level is in force")
        keys = await self.keys()
        level, sweep = keys["log.level"], keys["times.sweep"]
        self.assertEqual((level["value"], level["reloaded"], level["waits"]), ("debug", True, None))
        self.assertEqual((sweep["value"], sweep["from"], sweep["reloaded"]), (60.0, "default", False))
        waits = sweep["waits"]
        self.assertEqual(
            (waits["value"], waits["file"], waits["line"]), (30.0, self.file, self.line("sweep"))
        )
        self.assertEqual([key for key, each in keys.items() if each["waits"]], ["times.sweep"])
        text = await self.show()
        self.assertRegex(text, rf"(?m)^log.level +\"debug\" +{self.file}:\d+, by a reload +-$")
        self.assertRegex(text, rf"(?m)^times.sweep +60.0 +default +30.0 \({self.file}:\d+\)$")
        self.assertIn("Waiting for a restart (systemctl restart infranetes): times.sweep\n", text)
        self.assertIn("was last reloaded at ", text)

        self.config["log"] = {"level": "loud"}
        await self.reload("everything stays as it was")
        self.assertEqual((await self.keys())["log.level"]["value"], "debug")
        self.assertIn(f"The last reload did nothing: {self.file}: log.level: ", await self.show())

        self.config["log"] = {"level": "debug"}
        await self.kill()
        await self.start()
        keys = await self.keys()
        self.assertEqual((keys["times.sweep"]["value"], keys["times.sweep"]["from"]), (30.0, "file"))
        self.assertEqual([key for key, each in keys.items() if each["waits"] or each["reloaded"]], [])

    async def test_crictl_info_has_the_same_values(self) -> None:
        await self.start()
        answer = await self.runtime.Status(cri.StatusRequest(verbose=True), timeout=60)
        keys = await self.keys()
        self.assertEqual(
            json.loads(answer.info["config"]), {key: each["value"] for key, each in keys.items()}
        )
