# SPDX-License-Identifier: Apache-2.0
"""A real runtime behind the daemon: crictl sees pods of both, whichever of the two is killed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from twisted.internet.threads import deferToThread

from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_mounts, needs_tools
from tests.interop.critest_images import PAUSE, REGISTRIES
from tests.interop.critest_runtimes import removed
from tests.interop.killable import Killable
from tests.interop.test_crictl import CrictlCase
from tests.support.oci import busybox
from tests.support.registry import Registry
from tests.support.waiting import listens

IMAGE = f"{REGISTRIES[0]}/busybox:1"
VM = "infranetes"  # the runtime handler
# Namespaces as kubelet asks for them, of the pod and of each container.
ON_THE_NODE = {
    "security_context": {"namespace_options": {"network": int(cri.NODE), "pid": int(cri.CONTAINER)}}
}


class DelegateCase(CrictlCase):
    """Pods of the delegate have the node's network here, as the CNI would need a bridge of its own.

    :cvar name: the delegate's, as it says itself. :cvar version: how that begins, as an expression."""

    timeout = 300
    patience = 2.0
    name = ""
    version = ""

    def runtime_in(self, root: Path) -> Killable:
        """The delegate, not started."""
        raise NotImplementedError

    async def begin(self) -> None:
        """The delegate with an image of its sandboxes', and the daemon in front of it."""
        place = Path(tempfile.mkdtemp(prefix="inf-", dir="/var/tmp"))  # no overlay file system
        self.addCleanup(deferToThread, removed, place)
        self.delegate = self.runtime_in(place / "c")
        self.registry = await deferToThread(Registry().start)
        self.addCleanup(deferToThread, self.registry.stop)
        await deferToThread(self.registry.push, *PAUSE, busybox({"Cmd": ["sleep", "2147483647"]}))
        await deferToThread(self.registry.push, "busybox", "1", busybox())
        self.addCleanup(deferToThread, self.delegate.end)
        await deferToThread(self.delegate.start, self.registry)
        self.image = IMAGE
        self.config["delegate"] = {"socket": str(self.delegate.socket)}
        self.config["providers"]["simulated"]["images"] = "layers"
        await self.again()

    async def again(self) -> None:
        """Start the daemon."""
        self.process = self.spawn()
        await self.connect()

    async def pods(self) -> dict[str, str]:
        """Name and state of each."""
        listed = await self.json("pods")
        return {each["metadata"]["name"]: each["state"] for each in listed["items"]}

    async def boxes(self) -> dict[str, str]:
        """Name and state of each container."""
        listed = await self.json("ps", "-a")
        return {each["metadata"]["name"]: each["state"] for each in listed["containers"]}

    async def pods_of_both_outlive_both(self) -> None:
        """The test, of which the delegate is whichever."""
        await self.begin()
        self.assertRegex(
            await self.crictl("version"), rf"RuntimeName:\s+{self.name}\s+RuntimeVersion:\s+{self.version}"
        )
        await self.crictl("pull", IMAGE)
        # As kubelet does: it asks for the name, pulls only what is not there, and gives the id on.
        id = (await self.json("inspecti", IMAGE))["status"]["id"]
        image = {"image": id, "user_specified_image": IMAGE}
        theirs, ours = self.pod_file("theirs", linux=ON_THE_NODE), self.pod_file("ours")
        sandbox = await self.crictl("runp", theirs)
        in_runc = self.box_file("in-runc", "echo hello; sleep 1000", linux=ON_THE_NODE, image=image)
        box = await self.box_in(sandbox, theirs, in_runc)
        vm = await self.crictl("runp", "--runtime", VM, ours)
        vm_box = await self.box_in(vm, ours, self.box_file("in-a-vm", image=image))
        self.assertEqual([len(each) for each in (sandbox, box, vm, vm_box)], [64, 64, 32, 32])
        running = {"in-runc": "CONTAINER_RUNNING", "in-a-vm": "CONTAINER_RUNNING"}
        ready = {"theirs": "SANDBOX_READY", "ours": "SANDBOX_READY"}
        self.assertEqual((await self.pods(), await self.boxes()), (ready, running))
        # By the beginnings of ids, too; and a stream of the delegate's own.
        self.assertEqual(await self.crictl("exec", "--sync", box[:12], "echo", "hi"), "hi")
        self.assertEqual(await self.crictl("exec", box, "echo", "streamed"), "streamed")
        self.assertEqual(await self.crictl("logs", box[:12]), "hello")
        self.assertEqual((await self.json("inspectp", vm[:6]))["status"]["id"], vm)
        (shown,) = [each for each in (await self.json("images"))["images"] if IMAGE in each["repoTags"]]
        listed = (await self.json("ps"))["containers"]
        # What kubelet compares, so that it does not remove what is in use.
        used = {each["imageId"] or each["imageRef"] for each in listed}
        self.assertEqual((used, shown["id"]), ({id}, id))

        await deferToThread(self.delegate.kill)
        self.assertIn("does not answer", await self.fails("pods"))
        # crictl itself asks for the version first, which is the delegate's.
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=vm)
        status = (await self.runtime.PodSandboxStatus(request, timeout=30.0)).status
        self.assertEqual((status.id, status.state), (vm, cri.SANDBOX_READY))
        await self.kill()
        await deferToThread(self.delegate.again)
        await self.again()
        self.assertEqual((await self.pods(), await self.boxes()), (ready, running))
        await self.kill()
        await deferToThread(self.delegate.kill)
        self.process = self.spawn()  # before the delegate
        await self.until(lambda: listens(self.socket), "the daemon serves", 60.0)
        await deferToThread(self.delegate.again)
        await self.connect()
        self.assertEqual((await self.pods(), await self.boxes()), (ready, running))
        self.assertEqual(await self.crictl("exec", "--sync", box, "echo", "still"), "still")

        for id in (sandbox, vm):
            await self.crictl("stopp", id)
            await self.crictl("rmp", id)
        self.assertEqual((await self.pods(), await self.boxes()), ({}, {}))
        self.assertEqual(await self.vms(), [])


@needs_mounts
@slow(5, "containerd and the daemon start twice")
@needs_tools("crictl")
class ContainerdTests(DelegateCase):
    """containerd: Debian's, or another one that is first in PATH."""

    name = "containerd"

    def runtime_in(self, root: Path) -> Killable:
        return Killable(root)

    async def test_pods_of_both_outlive_both(self) -> None:
        await self.pods_of_both_outlive_both()
