# SPDX-License-Identifier: Apache-2.0
"""The manifests of docs/runtime-classes.md, verbatim, in a real API server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.cluster.case import ClusterCase, Manifest, container, pod, until
from tests.cluster.components import rights
from tests.contrib.test_virtlet import MANIFESTS as VIRTLET

IN_FORCE_SECONDS = 60.0
ASLEEP = container("main", "sleep 3600")


def annotated(name: str, **annotations: str) -> Manifest:
    """Return a pod with these annotations below `infranetes.io/`."""
    found = pod(name, ASLEEP)
    names = {f"infranetes.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    found["metadata"]["annotations"] = names
    return found


class RuntimeClassTests(ClusterCase):
    def setUp(self) -> None:
        super().setUp()
        manifests = rights("runtime-classes.md").encode()
        self.addCleanup(self.kubectl, "label", "node", "node", "infranetes.io/vms-")
        self.kubectl("label", "node", "node", "infranetes.io/vms=true")
        self.addCleanup(self.kubectl, "delete", "--ignore-not-found", "--filename", "-", given=manifests)
        self.kubectl("apply", "--filename", "-", given=manifests)

    def test_the_example_of_kubelets_page_is_taken(self) -> None:
        """The API server knows every field of it, and refuses none."""
        given = rights("kubelet.md", 2).partition("---\n")[2].encode()
        self.assertIn(b"RuntimeClass", given)
        strictly = ("--validate=strict", "--filename", "-")
        runtime_class = given.partition(b"---\n")[0]  # it must exist before a pod can name it
        self.addCleanup(self.kubectl, "delete", "--ignore-not-found", "--filename", "-", given=runtime_class)
        self.kubectl("apply", *strictly, given=runtime_class)
        self.here("apply", "--dry-run=server", *strictly, given=given)

    def label(self) -> None:
        """Label the namespace, so that its pods are VMs."""
        self.kubectl("label", "namespace", self.namespace, "infranetes.io/runtime=vm")

    def given(self, wanted: Manifest) -> Manifest:
        """Return a pod as the API server would store it. :raise AssertionError: it is refused."""
        words = ("create", "--dry-run=server", "--output", "json", "--filename", "-")
        found: Manifest = json.loads(self.here(*words, given=json.dumps(wanted).encode()))
        return found

    def in_force(self, wanted: Manifest, holds: Callable[[Manifest], Any]) -> Manifest:
        """Return a pod as the API server would store it, once `holds` accepts it: policies take a moment."""
        found: list[Manifest] = []

        def shows() -> bool:
            found[:] = [self.given(wanted)]
            return bool(holds(found[0]))

        until(shows, f"the policies are in force: {found}", IN_FORCE_SECONDS)
        return found[0]

    def test_pods_of_a_labelled_namespace_are_vms_with_all_that_belongs_to_one(self) -> None:
        self.label()
        found = self.in_force(pod("web", ASLEEP), lambda found: found["spec"].get("runtimeClassName"))
        spec = found["spec"]
        self.assertEqual(spec["runtimeClassName"], "infranetes")
        self.assertEqual(spec["overhead"], {"cpu": "100m", "memory": "416Mi"})
        self.assertEqual(spec["nodeSelector"], {"infranetes.io/vms": "true"})
        self.assertIn("infranetes.io/vms", [each["key"] for each in spec["tolerations"]])
        self.apply(pod("web", ASLEEP))
        self.assertEqual(self.wait_until_ready("web")["spec"]["runtimeClassName"], "infranetes")

    def test_what_shares_with_the_node_or_says_so_stays_on_it(self) -> None:
        self.label()
        self.in_force(pod("web", ASLEEP), lambda found: found["spec"].get("runtimeClassName"))
        labelled = pod("labelled", ASLEEP)
        labelled["metadata"]["labels"]["infranetes.io/runtime"] = "node"
        for wanted in (
            labelled,
            pod("network", ASLEEP, hostNetwork=True),
            pod("processes", ASLEEP, hostPID=True),
            pod("memory", ASLEEP, hostIPC=True),
        ):
            self.assertNotIn("runtimeClassName", self.given(wanted)["spec"])

    def test_pods_of_other_namespaces_stay_as_they_are(self) -> None:
        self.label()
        self.in_force(pod("web", ASLEEP), lambda found: found["spec"].get("runtimeClassName"))
        self.kubectl("label", "namespace", self.namespace, "infranetes.io/runtime-")
        self.in_force(pod("web", ASLEEP), lambda found: "runtimeClassName" not in found["spec"])

    def test_an_annotation_that_is_not_allowed_is_refused_by_name(self) -> None:
        def refusal() -> str:
            try:
                self.given(annotated("web", elastic_address="new", subnet="subnet-0a"))
            except AssertionError as error:
                return str(error)
            return ""

        said = until(refusal, "the policy is in force", IN_FORCE_SECONDS)
        self.assertIn("may not have the annotations infranetes.io/elastic-address: ask", said)
        self.given(annotated("web", subnet="subnet-0a"))
        earlier = pod("web", ASLEEP)
        earlier["metadata"]["annotations"] = {"infranetes.aws.subnet": "subnet-0b", "example.com/a": "b"}
        refused = self.assertRaises(AssertionError, self.given, earlier)
        self.assertIn("infranetes.aws.subnet", str(refused))
        earlier["metadata"]["annotations"] = {"VirtletCPUModel": "host-model"}
        refused = self.assertRaises(AssertionError, self.given, earlier)
        self.assertIn("VirtletCPUModel", str(refused))

    def test_a_namespaces_subnet_is_its_pods_whatever_they_say(self) -> None:
        words = ("infranetes.io/subnet=subnet-0a", "infranetes.io/security-groups=sg-0a,sg-0b")
        self.kubectl("annotate", "namespace", self.namespace, *words)
        expected = {"infranetes.io/subnet": "subnet-0a", "infranetes.io/security-groups": "sg-0a,sg-0b"}
        self.in_force(pod("web", ASLEEP), lambda found: found["metadata"].get("annotations", {}) == expected)
        found = self.given(annotated("web", subnet="subnet-of-others", set_hostname="false"))
        expected |= {"infranetes.io/set-hostname": "false"}
        self.assertEqual(found["metadata"]["annotations"], expected)

    def test_a_tenants_runtime_class_is_for_its_namespaces_alone(self) -> None:
        def of(name: str) -> Manifest:
            wanted = pod("web", ASLEEP)
            wanted["spec"] |= {"runtimeClassName": name} if name else {}
            return wanted

        def refusal(name: str) -> str:
            try:
                self.given(of(name))
            except AssertionError as error:
                return str(error)
            return ""

        said = until(lambda: refusal("tenant-globex"), "the policy is in force", IN_FORCE_SECONDS)
        self.assertIn("the namespace is of no tenant", said)
        self.given(of("infranetes"))
        self.kubectl("label", "namespace", self.namespace, "infranetes.io/tenant=globex")
        self.in_force(of("tenant-globex"), lambda found: found["spec"]["runtimeClassName"] == "tenant-globex")
        for other in ("infranetes", ""):
            self.assertIn("the namespace is of tenant globex", refusal(other))
        self.kubectl("label", "--overwrite", "namespace", self.namespace, "infranetes.io/tenant=acme")
        until(lambda: "is of tenant acme" in refusal("tenant-globex"), "the label counts", IN_FORCE_SECONDS)

    def test_virtlets_annotation_chooses_a_runtime_class_unless_the_pod_does(self) -> None:
        manifests = VIRTLET.read_bytes()
        self.addCleanup(self.kubectl, "delete", "--ignore-not-found", "--filename", "-", given=manifests)
        self.kubectl("apply", "--validate=strict", "--filename", "-", given=manifests)
        wanted = pod("web", ASLEEP)
        wanted["metadata"]["annotations"] = {"kubernetes.io/target-runtime": "virtlet.cloud"}
        found = self.in_force(wanted, lambda found: found["spec"].get("runtimeClassName"))
        self.assertEqual(found["spec"]["runtimeClassName"], "virtlet")
        self.assertEqual(found["spec"]["overhead"], {"cpu": "100m", "memory": "128Mi"})
        wanted["spec"]["runtimeClassName"] = "infranetes"
        self.assertEqual(self.given(wanted)["spec"]["runtimeClassName"], "infranetes")
        self.assertNotIn("runtimeClassName", self.given(pod("plain", ASLEEP))["spec"])
