# SPDX-License-Identifier: Apache-2.0
"""The page of a pod whose VM is real: its timeline, and what its guest writes to the console."""

from __future__ import annotations

import re

from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase
from tests.infranetes.monitoring.client import get

SECRET = "0123456789abcdef0123456789abcdef"
EVIL = "<script>alert(1)</script>"
WRITE = f"mknod /tmp/console c 5 1 && printf '%s\\033[31m\\n' '{EVIL}' >/tmp/console"


class NodePageTests(PodCase):
    async def page(self, path: str) -> str:
        url = re.findall(r"metrics are served on (http\S+/)metrics", self.log)[-1]
        answer = await get(url + path, {"Authorization": f"Bearer {SECRET}"})
        self.assertEqual(answer.status, 200, answer.body)
        return answer.body

    async def test_a_pods_page_has_its_timeline_and_its_console_escaped(self) -> None:
        token = self.root / "token"
        token.write_text(SECRET)
        token.chmod(0o600)
        self.config["metrics"] = {"listen": "127.0.0.1:0", "page": True, "token_file": str(token)}
        await self.start()
        sandbox = await self.run_pod("web")
        powers = cri.LinuxContainerConfig(security_context=cri.LinuxContainerSecurityContext(privileged=True))
        container = await self.run_container(sandbox, self.box(script="sleep 600", linux=powers))
        done = await self.execute(container, "sh", "-c", WRITE)
        self.assertEqual((done.exit_code, done.stderr), (0, b""))
        self.assertIn("default/web", await self.page(""))
        for _ in range(100):
            page = await self.page("pods/default/web")
            if "alert(1)" in page:
                break
            await self.sleep(0.1)
        self.assertIn("&lt;script&gt;alert(1)&lt;/script&gt;", page)
        self.assertNotIn(EVIL, page)
        self.assertNotIn("\033", page)
        timeline = page.partition('id="timeline"')[2].partition("<h2>Containers")[0]
        for words in ("the agent in the VM starts, and answers", "container is started", 'class="took"'):
            self.assertIn(words, timeline)
