# SPDX-License-Identifier: Apache-2.0
"""The daemon as infranetes.service runs it: in that unit's own sandbox, under a real systemd."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from infranetes_simulation.provider.farm_client import FarmClient
from infranetes_simulation.provider.settings import Settings
from tests.infranetes.daemon.case import ROOT, DaemonCase, reactor
from tests.support.systemd import Systemd

UNIT = ROOT / "debian" / "infranetes.service"

# What a test changes of the unit: which daemon it runs and where that writes. The sandbox stays the unit's.
_DROP_IN = """
[Service]
ExecStart=
ExecStart={python} {script} --nodaemon --pidfile= infranetes --config {config}
Environment=PYTHONPATH={root} PYTHONUNBUFFERED=1
WorkingDirectory={root}
StandardOutput=append:{log}
StandardError=append:{log}
StateDirectory=
Restart=no
"""
_SCRIPT = "from twisted.scripts.twistd import run\nrun()\n"

# Lives as long as the unit, and stops it when it is asked to end itself.
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
    """As `DaemonCase`. The machines are outside of the sandbox, as real ones are."""

    def make_root(self) -> Path:
        self.manager = _manager()
        root = Path(tempfile.mkdtemp(prefix="inf-", dir=self.manager.root))  # writable inside
        root.chmod(0o755)
        return root

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
            _DROP_IN.format(
                python=sys.executable, script=script, config=shlex.quote(str(config)), root=ROOT, log=log
            )
        )
        environment = {**os.environ, "MANAGER": str(self.manager.pid)}
        return subprocess.Popen(["sh", "-c", _KEEPER], stdin=subprocess.DEVNULL, env=environment)


_managers: list[Systemd] = []


def _manager() -> Systemd:
    if not _managers:
        manager = Systemd()
        atexit.register(manager.stop)
        _managers.append(manager.start())
    return _managers[0]
