# SPDX-License-Identifier: Apache-2.0
"""Both kinds of pods share one image store, and image pull policies and secrets work for both."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.case import states, until
from tests.cluster.containerd import PASSWORD, PRIVATE, USER, private_registry
from tests.support import oci
from tests.support.oci import BuiltImage
from tests.support.registry import Registry
from tests.workloads.mixed import MixedCase, in_a_vm, on_the_node

KINDS = {"vm": in_a_vm, "runc": on_the_node}
SECRET = "of-the-registry"
ASLEEP = ["sleep", "3600"]
COLLECTED_SECONDS = 480  # kubelet looks for unused images every five minutes


def image(content: str) -> BuiltImage:
    """Return an image with a layer of its own, whose content its containers print."""
    own = oci.layer({"content": content.encode()})
    return oci.image([oci.busybox_layer(), own], {"Cmd": ["cat", "/content"]})


class ImagesCase(MixedCase):
    def setUp(self) -> None:
        super().setUp()
        account = (f"--docker-username={USER}", f"--docker-password={PASSWORD}")
        self.here("create", "secret", "docker-registry", SECRET, f"--docker-server={PRIVATE}", *account)
        root = Path(tempfile.mkdtemp(prefix="registry-"))
        # It has the content of the cluster's private registry, which can't be reached from here.
        (root / "data").symlink_to(private_registry(self.cluster.paths.place))
        self.registry = Registry(root=root).start()
        self.addCleanup(self.end_registry)

    def end_registry(self) -> None:
        self.registry.stop_process()
        for path in self.registry.root.iterdir():
            path.unlink()
        self.registry.root.rmdir()

    def reference(self, name: str) -> str:
        """Return the name that pods use for that image of this test."""
        return f"{PRIVATE}/{self.namespace}/{name}:1"

    def content(self, word: str) -> str:
        """Return a line that only this test uses."""
        return f"{word} of {self.namespace}\n"

    def push(self, name: str, content: str) -> BuiltImage:
        """Push an image with this content, under that name."""
        made = image(self.content(content))
        self.registry.push(f"{self.namespace}/{name}", "1", made)
        return made

    def make(self, kind: str, name: str, policy: str, image: str = "", **fields: Any) -> str:
        """Make a pod with the kind's own image, or `image`; return its name.

        :param fields: fields of its container. `secret`: whether the pod has the registry's secret."""
        secrets = {"imagePullSecrets": [{"name": SECRET}]} if fields.pop("secret", True) else {}
        box = {"name": "main", "image": self.reference(image or kind), "imagePullPolicy": policy, **fields}
        self.apply(KINDS[kind](f"{name}-{kind}", box, **secrets))
        return f"{name}-{kind}"

    def waits_because(self, name: str) -> tuple[str, str]:
        """Return why a pod's container is not started: kubelet's reason and its message."""
        state = states(self.get("pod", name)).get("main", {}).get("state", {})
        waiting = state.get("waiting", {})
        return waiting.get("reason", ""), waiting.get("message", "")


class PolicyTests(ImagesCase):
    def said(self, name: str) -> str:
        """Wait until a pod has succeeded, and return what it has written."""
        self.wait_for_phase(name, "Succeeded")
        return self.logs(name)

    def refused(self, name: str, *reasons: str) -> str:
        """Wait until a pod waits for one of these reasons, and return the message."""
        until(lambda: self.waits_because(name)[0] in reasons, f"{name} waits for {reasons}", 240)
        return self.waits_because(name)[1]

    def test_policies_and_credentials_hold_for_both_kinds(self) -> None:
        for kind in KINDS:
            self.push(kind, "first")
        absent = [self.make(kind, "absent", "Never") for kind in KINDS]
        denied = [self.make(kind, "denied", "IfNotPresent", secret=False) for kind in KINDS]
        for name in absent:
            self.refused(name, "ErrImageNeverPull")
        for name in denied:
            self.refused(name, "ErrImagePull", "ImagePullBackOff")
            self.assertIn("401", self.events_of(name))
        self.here("delete", "pods", "--all", timeout=120)

        for name in [self.make(kind, "first", "IfNotPresent") for kind in KINDS]:
            self.assertEqual(self.said(name), self.content("first"))
        for kind in KINDS:
            self.push(kind, "second")
        kept = [
            self.make(kind, policy.lower(), policy) for kind in KINDS for policy in ("IfNotPresent", "Never")
        ]
        for name in kept:
            self.assertEqual(self.said(name), self.content("first"), name)
        for name in [self.make(kind, "always", "Always") for kind in KINDS]:
            self.assertEqual(self.said(name), self.content("second"), name)
        for name in [self.make(kind, "then", "IfNotPresent") for kind in KINDS]:
            self.assertEqual(self.said(name), self.content("second"), name)

    def events_of(self, name: str) -> str:
        """Return the messages of a pod's events."""
        words = ("--field-selector", f"involvedObject.name={name}", "--output=jsonpath={.items[*].message}")
        return self.here("get", "events", *words)


class CollectionTests(ImagesCase):
    """kubelet removes unused images once the disk is as full as it is configured."""

    def configure(self, **changes: object) -> Mapping[str, object]:
        """Change kubelet's configuration and restart it; return the settings from before."""
        path = self.cluster.paths.place / "kubelet.json"
        found: dict[str, object] = json.loads(path.read_text())
        path.write_text(json.dumps({**found, **changes}))
        self.cluster.restart("kubelet")
        return {key: found[key] for key in changes if key in found}

    def images(self) -> set[str]:
        """Return the tags of all images."""
        listed = json.loads(self.cluster.inside("crictl", "images", "--output", "json"))["images"]
        return {tag for each in listed for tag in each["repoTags"]}

    def disks(self, image: BuiltImage) -> bool:
        """Return whether there is a disk of the image's own layer."""
        name = image.diff_ids[-1].removeprefix("sha256:")
        cached = self.cluster.paths.place / "var-lib/infranetes/delegate-images/disks"
        return any(cached.rglob(f"{name}*"))

    def test_images_of_vms_stay_and_unused_ones_go_with_their_disks(self) -> None:
        used, unused = self.push("used", "used"), self.push("unused", "unused")
        self.wait_until_ready(self.make("vm", "used", "IfNotPresent", "used", command=ASLEEP))
        self.wait_until_ready(self.make("runc", "used", "IfNotPresent", "used", command=ASLEEP))
        self.here("delete", "pod", "used-runc", timeout=120)
        name = self.make("vm", "unused", "IfNotPresent", "unused")
        self.wait_for_phase(name, "Succeeded")
        self.here("delete", "pod", name, timeout=120)
        self.assertTrue(self.disks(used) and self.disks(unused))
        self.assertLessEqual({self.reference("used"), self.reference("unused")}, self.images())

        before = self.configure(
            imageGCHighThresholdPercent=2, imageGCLowThresholdPercent=1, imageMinimumGCAge="1s"
        )
        self.addCleanup(self.configure, **{"imageMinimumGCAge": "2m", **before})
        gone = self.reference("unused")
        until(lambda: gone not in self.images(), "the unused image is removed", COLLECTED_SECONDS)
        until(lambda: not self.disks(unused), "its disk is removed", 180)
        self.assertIn(self.reference("used"), self.images())
        self.assertTrue(self.disks(used))
        self.assertEqual(self.execute("used-vm", "cat", "/content").stdout, self.content("used").encode())
        self.wait_until_ready(self.make("vm", "again", "Never", "used", command=ASLEEP))
        name = self.make("vm", "pulled", "IfNotPresent", "unused")
        self.wait_for_phase(name, "Succeeded")
        self.assertEqual(self.logs(name), self.content("unused"))
