# SPDX-License-Identifier: Apache-2.0
"""The agent's mounts are its own until a pod's provider needs the machine to see them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import quiet
from infranetes_common.errors import FailedPrecondition
from tests.harness.needs import needs_mounts
from vmserver.machine.mount_namespace import join

# What a machine's boot and the guest's unit do, in a namespace that stands for the machine; then `$1`.
_MACHINE = """
set -eu
mount -t tmpfs run /run
mount --make-rprivate /
mount --make-rshared /
{unit}
exec "$@"
"""
# The agent: it joins its namespace at each of its starts.
_AGENT = """
import json, os, subprocess, sys
from pathlib import Path

AGENT = '''
import sys
from pathlib import Path
from vmserver.machine.mount_namespace import join, thd_share
from vmserver.machine.mounts import NO_FLAGS, mount
join("/run/infranetes/mounts")
for word in sys.argv[2:]:
    if word == "share":
        thd_share(Path(sys.argv[1]))
    else:
        Path(word).mkdir()
        mount("tmpfs", word, "tmpfs", NO_FLAGS)
'''

def agent(*words):
    command = [sys.executable, "-c", AGENT]
    subprocess.run([*command, f"/proc/{os.getpid()}/root", *words], check=True)

def seen():
    return [line.split()[4] for line in open("/proc/self/mountinfo")]

found = []
agent("/run/own", sys.argv[1] + "/own")
found.append(seen())
agent("share", "/run/shared", sys.argv[1] + "/shared")
agent("share", "/run/again")
found.append(seen())
print(json.dumps(found))
"""


@needs_mounts
class NamespaceTests(SynchronousTestCase):
    def test_the_machine_sees_what_is_mounted_once_it_is_shared_by_a_restarted_agent_too(self) -> None:
        with tempfile.TemporaryDirectory(prefix="infranetes-mounts-") as disk:
            [unit] = [text for path, (_, text) in quiet.OWN_MOUNTS.items() if path.endswith(".service")]
            commands = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("ExecStart=")]
            script = _MACHINE.format(unit="\n".join(commands))
            # Since Linux 6.18 each processor numbers namespaces for itself, and one is kept only by a mount
            # in a namespace with a lower number. A real machine's has the lowest.
            processor = str(min(os.sched_getaffinity(0)))
            machine = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh"]
            command = ["taskset", "--cpu-list", processor, *machine]
            done = subprocess.run(
                [*command, sys.executable, "-c", _AGENT, disk], capture_output=True, text=True, check=False
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            before, after = json.loads(done.stdout)
        own = {"/run/own", f"{disk}/own"}
        shared = {"/run/shared", f"{disk}/shared", "/run/again"}
        self.assertFalse({*before} & own, before)
        self.assertEqual({*after} & (own | shared), shared)

    def test_a_namespace_that_is_not_there_is_named(self) -> None:
        file = self.mktemp()
        for missing in (file, "/dev/null"):
            error = self.assertRaises(FailedPrecondition, join, missing)
            self.assertIn(f"mount_namespace {missing}", str(error))
