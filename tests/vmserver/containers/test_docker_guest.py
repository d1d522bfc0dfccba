# SPDX-License-Identifier: Apache-2.0
"""Containers with the OCI runtime that the guest image configures."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.guest import recipe
from infranetes_common.wire import cri
from tests.contract.container_provider import ExecContract
from tests.harness.needs import needs_crun
from tests.harness.tools import need
from tests.support.dockerd import Dockerd
from tests.vmserver.containers.test_docker import DockerCase

_shared: list[Dockerd] = []

# crun refuses a machine that has both versions of cgroups, so it sees only the first.
_CRUN = """\
#!/bin/sh
exec unshare --mount sh -c 'umount -l /sys/fs/cgroup/unified 2>/dev/null; exec {crun} "$@"' sh "$@"
"""


def guests_engine() -> Dockerd:
    """Return an engine with the guest's runtime, one for all tests of this process."""
    if not _shared:
        directory = Path(tempfile.mkdtemp(prefix="runtime-"))
        crun = directory / "crun"
        crun.write_text(_CRUN.format(crun=need("crun")))
        docker = json.loads(recipe.DOCKER.files["etc/docker/daemon.json"][1])
        path = docker["runtimes"][docker["default-runtime"]]["path"]
        program = crun
        if path.lstrip("/") in recipe.DOCKER.files:
            program = directory / "runtime"
            program.write_text(recipe.DOCKER.files[path.lstrip("/")][1].replace("/usr/bin/crun", str(crun)))
        for each in (crun, program):
            each.chmod(0o755)
        engine = Dockerd(program)
        atexit.register(shutil.rmtree, directory)
        atexit.register(engine.stop)
        _shared.append(engine.start())
    return _shared[0]


@needs_crun
class GuestExecTests(DockerCase, ExecContract, TestCase):
    """ExecSync and sessions."""

    def engine(self) -> Dockerd:
        return guests_engine()

    async def test_a_command_has_the_changed_limits_of_its_container(self) -> None:
        resources = cri.LinuxContainerResources(oom_score_adj=100)
        id = await self.run_container("sleep", "600", linux=cri.LinuxContainerConfig(resources=resources))
        for score in (100, 500):
            await self.provider.update(id, cri.LinuxContainerResources(oom_score_adj=score))
            state: Any = await self.state(id)
            self.assertEqual(Path(f"/proc/{state.pid}/oom_score_adj").read_text(), f"{score}\n")
            script = "cat /proc/self/oom_score_adj; cat /proc/self/oom_score_adj & wait"
            result = await self.exec(id, "sh", "-c", script)
            self.assertEqual(result.stdout, b"%d\n%d\n" % (score, score))
