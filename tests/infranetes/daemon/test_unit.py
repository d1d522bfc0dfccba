# SPDX-License-Identifier: Apache-2.0
"""What the unit's sandbox lets the daemon do with volumes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from infranetes.volumes.mounts import Source
from infranetes_common.wire import cri
from tests.infranetes.daemon.unit import UnitCase

GROUP = 2000


class WriteBackTests(UnitCase):
    async def test_what_a_job_wrote_into_an_fsgroup_volume_is_there_when_its_end_is_told(self) -> None:
        await self.start()
        shared = Path(os.path.realpath(self.root)) / "shared"
        shared.mkdir()
        os.chown(shared, 0, GROUP)
        shared.chmod(0o2775)  # as kubelet makes a volume of a pod with an fsGroup
        there = f"$(find {self.root} -path '*{Source(str(shared), False, False).id}/directory')"
        script = (
            f"cd {there} && umask 002 && mkdir -p out/deep && echo 42 >out/deep/result && "
            "cp /bin/true program && chmod 6755 program && mkdir last && echo done >last/file; exit 3"
        )
        mounts = [cri.Mount(container_path="/out", host_path=str(shared))]
        container = await self.run_container(await self.run_pod(), self.box(script=script, mounts=mounts))
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual((status.exit_code, status.reason, status.message), (3, "Error", ""))
        self.assertEqual((shared / "out" / "deep" / "result").read_text(), "42\n")
        self.assertEqual((shared / "last" / "file").read_text(), "done\n")
        for path in (shared, shared / "out", shared / "out" / "deep", shared / "last"):
            found = path.stat()
            self.assertEqual((stat.S_IMODE(found.st_mode), found.st_gid), (0o2775, GROUP), path)
        program = (shared / "program").stat()
        self.assertEqual(stat.S_IMODE(program.st_mode), 0o755)  # no set-id bit of a file leaves a machine
