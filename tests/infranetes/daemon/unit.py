# SPDX-License-Identifier: Apache-2.0
"""The daemon as infranetes.service runs it: in that unit's sandbox, under a real systemd."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from infranetes_simulation.provider.farm_client import FarmClient
from infranetes_simulation.provider.settings import Settings
from tests.infranetes.daemon.case import ROOT, DaemonCase, reactor
from tests.support.systemd import Systemd

UNIT = ROOT / "debian" / "infranetes.service"
GUEST_UNIT = ROOT / "debian" / "infranetes.infranetes-guest.service"

# What a test changes in the unit: the program and where it writes. The sandbox stays that of the unit.
_COMMON = """
Environment=PYTHONPATH={root} PYTHONUNBUFFERED=1
WorkingDirectory={root}
StandardOutput=append:{log}
StandardError=append:{log}
StateDirectory=
Restart=no
"""
_DROP_IN = """
[Service]
ExecStart=
ExecStart={python} {script} --nodaemon --pidfile= infranetes --config {config}
"""
_SCRIPT = "from twisted.scripts.twistd import run\nrun()\n"

# The same where it runs a program of a test's own.
_PROGRAM = """
[Unit]
ConditionPathExists=
[Service]
Type=oneshot
ExecStart=
ExecStart={python} {script} {argument}
ExecReload=
"""
# Where a unit has a /tmp of its own.
_SEES = "[Service]\nBindPaths={directory}\nBindReadOnlyPaths={root}\n"
_SECONDS = 120.0

# Runs as long as the unit, and stops it when it receives a signal.
_KEEPER = """
control() { nsenter --target "$MANAGER" --mount --pid --uts --ipc --cgroup systemctl "$@"; }
trap 'control stop infranetes; exit 0' TERM
control daemon-reload
control start --no-block infranetes
while case "$(control show --property=ActiveState,Job infranetes)" in
    *Job=[1-9]*|*ActiveState=active*|*=activating*|*=deactivating*) true ;; *) false ;; esac
do sleep 0.2 & wait $!; done
exit 1
"""


class UnitCase(DaemonCase):
    """A `DaemonCase` in the unit. The machines are outside the sandbox, as real ones are."""

    def make_root(self) -> Path:
        self.manager = _manager()
        root = Path(tempfile.mkdtemp(prefix="inf-", dir=self.manager.root))  # writable in the sandbox
        root.chmod(0o755)
        return root

    def lend(self, directory: Path) -> None:
        """Let the test's daemons write to a directory of the machine, which is read-only for the manager."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _beside(self.manager, "mount", "--bind", str(directory), str(directory))
        self.addCleanup(_beside, self.manager, "umount", str(directory))
        _beside(self.manager, "mount", "--options", "remount,bind,rw", str(directory))

    async def start(self, *flags: str, crash: tuple[str, int] | None = None) -> None:
        farm = FarmClient(
            reactor, Settings().farm_command, self.root / "state" / "simulated",
            self.root / "run" / "simulated", lambda vms: None, lambda *_: None,
        )  # fmt: skip
        await farm.connect()
        await farm.stop(end_farm=False)
        await super().start(*flags, crash=crash)

    def spawn(
        self, *flags: str, crash: tuple[str, int] | None = None, background: str = ""
    ) -> subprocess.Popen[bytes]:
        config, script = self.root / "infranetes.toml", self.root / "twistd.py"
        config.write_text(self.written())
        script.write_text(_SCRIPT)
        log = self.root / "daemon.log"
        log.touch()
        units = self.manager.run / "systemd" / "units-of-the-test"
        shutil.copy(UNIT, units)
        drop_in = units / "infranetes.service.d" / "test.conf"
        drop_in.parent.mkdir(exist_ok=True)
        drop_in.write_text(
            (_DROP_IN + _COMMON).format(
                python=sys.executable, script=script, config=shlex.quote(str(config)), root=ROOT, log=log
            )
        )
        environment = {**os.environ, "MANAGER": str(self.manager.pid)}
        return subprocess.Popen(["sh", "-c", _KEEPER], stdin=subprocess.DEVNULL, env=environment)

    def units(self, pattern: str) -> list[str]:
        """Return the running units that match this pattern."""
        said = _beside(
            self.manager, "systemctl", "list-units", "--plain", "--no-legend", "--state=running", pattern
        )
        return [line.split()[0] for line in said.splitlines()]


class UnitProgram:
    """A program that runs in a unit's sandbox instead of what the unit runs. Blocks.

    Mounts on the manager's machine propagate to running units, as they do outside tests.

    :param source: what Python executes. :param unit: the file of the unit: the daemon's or the guest image's.
    :ivar directory: its own, writable in the sandbox.
    """

    def __init__(self, source: str, unit: Path = UNIT) -> None:
        self._manager = _manager()
        self._unit = unit.name if unit == UNIT else unit.name.removeprefix("infranetes.")
        self.directory = Path(tempfile.mkdtemp(prefix="unit-", dir=self._manager.root))
        self.directory.chmod(0o755)
        (self.directory / "program.py").write_text(source)
        units = self._manager.run / "systemd" / "units-of-the-test"
        shutil.copy(unit, units / self._unit)
        self._drop_ins = units / f"{self._unit}.d"
        shutil.rmtree(self._drop_ins, ignore_errors=True)
        self._drop_ins.mkdir()
        if "\nPrivateTmp=yes\n" in unit.read_text():
            (self._drop_ins / "sees.conf").write_text(_SEES.format(directory=self.directory, root=ROOT))
        self.run("mount", "--make-rshared", "/")

    @property
    def _log(self) -> Path:
        return self.directory / "log"

    def run(self, *command: str) -> str:
        """Run a command beside the manager. It must succeed. Return its output."""
        return _beside(self._manager, *command)

    def add(self, drop_in: Path) -> None:
        """Copy a drop-in to the directory of the unit's drop-ins."""
        shutil.copy(drop_in, self._drop_ins)

    def start(self, argument: str) -> None:
        """Start the program with this argument."""
        self._log.write_text("")
        script = self.directory / "program.py"
        (self._drop_ins / "test.conf").write_text(
            (_PROGRAM + _COMMON).format(
                python=sys.executable, script=script, argument=argument, root=ROOT, log=self._log
            )
        )
        self.run("systemctl", "daemon-reload")
        self.run("systemctl", "start", "--no-block", self._unit)

    def says(self, words: str) -> None:
        """Wait until the program has written this."""
        self._until(lambda: words in self._log.read_text())

    def finished(self) -> str:
        """Wait for the program to end. Return what it wrote."""
        state = ("systemctl", "show", "--property=ActiveState,Job", self._unit)
        self._until(lambda: re.search("Job=[1-9]|=(de)?activating", self.run(*state)) is None)
        return self._log.read_text()

    def remove(self) -> None:
        """End the program, and leave the manager as it was."""
        self.run("systemctl", "stop", self._unit)
        shutil.rmtree(self._drop_ins)
        shutil.rmtree(self.directory)

    def _until(self, true: Callable[[], bool]) -> None:
        until = time.monotonic() + _SECONDS
        while not true():
            if time.monotonic() > until:
                raise AssertionError(f"the unit does not get on: {self._log.read_text()}")
            time.sleep(0.1)


def _beside(manager: Systemd, *command: str) -> str:
    enter = ["nsenter", f"--target={manager.pid}", "--mount", "--pid", "--uts", "--ipc", "--cgroup"]
    return subprocess.run([*enter, *command], check=True, capture_output=True, text=True).stdout


_managers: list[Systemd] = []


def _manager() -> Systemd:
    if not _managers:
        manager = Systemd()
        atexit.register(manager.stop)
        _managers.append(manager.start())
    return _managers[0]
