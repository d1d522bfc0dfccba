# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by helm itself, and the manifests that are made of it."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml
from twisted.trial.unittest import SynchronousTestCase

from infranetes import config
from infranetes.installer import kubelets, layout
from infranetes.installer.__main__ import parser
from infranetes.installer.cluster import INSTALL, STATE, VMS
from infranetes_common import __version__
from tests.contrib.queries import DASHBOARD
from tests.contrib.rendered import (
    CHART,
    HELM,
    NAMESPACE,
    PLAIN,
    TREE,
    by_kind,
    helm,
    objects,
    plain,
    template,
)
from tests.harness.needs import Need, Tier, needs

needs_helm = needs(Need("helm", "make helm", Tier.NIGHTLY, HELM.exists))
EVERYTHING = (
    "csi.enabled=true",
    "cni.enabled=true",
    "metrics.enabled=true",
    "metrics.tokenSecret=infranetes-metrics",
    "metrics.serviceMonitor.enabled=true",
    "metrics.dashboard.enabled=true",
    "admission.namespaces.enabled=true",
    "admission.tenants.enabled=true",
)


def pod_of(text: str) -> dict[str, Any]:  # Any: YAML
    spec: dict[str, Any] = by_kind(text)["DaemonSet", "infranetes-installer"]["spec"]["template"]
    return spec


def without_labels(thing: dict[str, Any]) -> dict[str, Any]:
    bare = copy.deepcopy(thing)
    bare["metadata"].pop("labels", None)
    return bare


def documented(page: str) -> dict[tuple[str, str], dict[str, Any]]:
    text = (TREE / "docs" / page).read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, flags=re.S) if page.endswith(".md") else [text]
    found = [each for block in blocks for each in objects(block)]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


@needs_helm
class ChartTests(SynchronousTestCase):
    timeout = 600

    def test_helm_finds_nothing_to_say_about_it(self) -> None:
        for settings in ((), EVERYTHING):
            flags = [flag for each in settings for flag in ("--set", each)]
            done = helm("lint", "--strict", str(CHART), "--kube-version", "1.36.0", *flags)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertNotIn("[WARNING]", done.stdout)

    def test_the_plain_manifests_are_what_it_renders_to(self) -> None:
        self.assertEqual(PLAIN.read_text(), plain(), "make them again: tests/contrib/helm render")

    def test_it_is_of_this_release(self) -> None:
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        semantic = re.sub(r"\.dev(\d+)$", r"-dev.\1", __version__)  # helm knows no other versions
        self.assertEqual((chart["version"], chart["appVersion"]), (semantic, __version__))
        (container,) = pod_of(template())["spec"]["containers"]
        self.assertEqual(container["image"], f"registry.example/infranetes:{__version__}")

    def test_every_object_is_named_once_and_in_the_namespace(self) -> None:
        for thing in by_kind(template(*EVERYTHING)).values():
            self.assertEqual(thing["metadata"].get("namespace", NAMESPACE), NAMESPACE)
            for subject in thing.get("subjects", ()):
                self.assertEqual(subject["namespace"], NAMESPACE)

    def test_values_that_there_are_not_and_wrong_ones_are_refused(self) -> None:
        for setting, word in (
            ("installer.stat=absent", "stat"),
            ("installer.state=gone", "state"),
            ("metrics.port=0", "port"),
            ("image.repository=", "repository"),
            ("runtimeClasses[0].handler=A_B", "handler"),
            ("kubelet.manage=perhaps", "manage"),
        ):
            error = str(self.assertRaises(AssertionError, template, setting))
            self.assertIn(word, error, setting)

    def test_the_schema_has_each_value_and_no_other(self) -> None:
        schema = json.loads((CHART / "values.schema.json").read_text())
        values = yaml.safe_load((CHART / "values.yaml").read_text())

        def compare(described: dict[str, Any], given: dict[str, Any], path: str) -> None:
            names = set(described["properties"]) - {"global"}
            self.assertEqual(names, set(given), path)
            self.assertIs(described["additionalProperties"], False, path)
            for name, value in given.items():
                if isinstance(value, dict) and "properties" in described["properties"][name]:
                    compare(described["properties"][name], value, f"{path}.{name}")

        compare(schema, values, "values")

    def test_metrics_without_a_token_are_refused(self) -> None:
        error = str(self.assertRaises(AssertionError, template, "metrics.enabled=true"))
        self.assertIn("metrics.tokenSecret", error)


@needs_helm
class InstallerTests(SynchronousTestCase):
    """The DaemonSet, and what its container is told."""

    timeout = 600

    def test_its_arguments_are_the_installers(self) -> None:
        for settings, wanted in (
            ((), {"cni": False, "csi": False, "leave_kubelet": False, "end_pods": False}),
            ((*EVERYTHING, "kubelet.manage=false", "installer.endPods=true"),
             {"cni": True, "csi": True, "leave_kubelet": True, "end_pods": True}),
        ):  # fmt: skip
            pod = pod_of(template(*settings))
            (container,) = pod["spec"]["containers"]
            values = {"NODE": "node-1", "NODE_IP": "10.0.0.5", "STATE": pod["metadata"]["annotations"][STATE]}
            arguments = container["args"]
            for name, value in values.items():
                arguments = [each.replace(f"$({name})", value) for each in arguments]
            self.assertEqual({each["name"] for each in container["env"]}, set(values))
            options = parser().parse_args(arguments)
            self.assertEqual((options.command, options.node, options.state), ("run", "node-1", "present"))
            self.assertEqual(options.root, Path("/host"))
            self.assertTrue(options.labels)
            self.assertEqual({name: getattr(options, name) for name in wanted}, wanted)
            mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            self.assertEqual(mounts["/host"], "host")
            self.assertEqual(set(mounts.values()), {each["name"] for each in pod["spec"]["volumes"]})
            for file in (options.config, options.ready, options.metrics_token):
                self.assertTrue(file is None or str(file.parent) in mounts, file)

    def test_it_runs_where_the_label_says_so_and_one_node_at_a_time(self) -> None:
        daemonset = by_kind(template())["DaemonSet", "infranetes-installer"]
        self.assertEqual(daemonset["spec"]["updateStrategy"]["rollingUpdate"], {"maxUnavailable": 1})
        affinity = daemonset["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        wanted = {each["key"]: each["values"] for each in term["matchExpressions"]}
        self.assertEqual(wanted[INSTALL], ["true", "absent"])
        runtime_class = by_kind(template())["RuntimeClass", "infranetes"]
        self.assertEqual(runtime_class["scheduling"]["nodeSelector"], {VMS: "true"})

    def test_a_node_counts_when_no_restart_of_kubelet_can_have_said_so(self) -> None:
        spec = by_kind(template())["DaemonSet", "infranetes-installer"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        # Within a period of its probe, kubelet knows better.
        self.assertGreaterEqual(spec["minReadySeconds"], 2 * container["readinessProbe"]["periodSeconds"])

    def test_another_configuration_replaces_the_pods(self) -> None:
        first = pod_of(template())["metadata"]["annotations"]
        second = pod_of(template("csi.enabled=true"))["metadata"]["annotations"]
        self.assertNotEqual(first["checksum/config"], second["checksum/config"])

    def test_the_daemon_takes_the_configuration_on_each_kind_of_node(self) -> None:
        for settings in ((), EVERYTHING):
            rendered = by_kind(template(*settings))["ConfigMap", "infranetes-config"]["data"][
                "infranetes.toml"
            ]
            for kind in kubelets.KINDS:
                kubelet = kubelets.Kubelet(kind, kind.units[0])
                text = layout.configuration(rendered, kubelet, "node-1", "10.0.0.5")
                with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                    file.write(text)
                    file.flush()
                    loaded = config.load(file.name, {})
                self.assertEqual(loaded.node, "node-1")
                assert loaded.delegate is not None
                self.assertEqual(loaded.delegate.socket, kind.runtime)
                handlers = {each["handler"] for each in objects(template()) if each["kind"] == "RuntimeClass"}
                self.assertLessEqual(handlers, set(loaded.runtime_handlers))

    def test_it_may_change_nodes_labels_and_a_removal_its_own_daemonset_alone(self) -> None:
        found = by_kind(template())
        self.assertEqual(
            found["ClusterRole", "infranetes-installer"]["rules"],
            [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}],
        )
        (rule,) = found["Role", "infranetes-removal"]["rules"]
        self.assertEqual(
            (rule["resources"], rule["resourceNames"]), (["daemonsets"], ["infranetes-installer"])
        )
        for kind in ("ClusterRoleBinding", "RoleBinding"):
            for (of, _), binding in found.items():
                if of == kind:
                    self.assertIn((binding["roleRef"]["kind"], binding["roleRef"]["name"]), found)
                    for subject in binding["subjects"]:
                        self.assertIn((subject["kind"], subject["name"]), found)

    def test_its_own_pods_have_no_annotation_that_its_policy_refuses(self) -> None:
        rendered = objects(template(*EVERYTHING))
        templates = [each["spec"]["template"] for each in rendered if each["kind"] in ("DaemonSet", "Job")]
        pods = [*templates, *(each for each in rendered if each["kind"] == "Pod")]
        names = {name for pod in pods for name in pod["metadata"].get("annotations", {})}
        self.assertIn(STATE, names)
        self.assertEqual([name for name in names if name.startswith(("infranetes.", "infranetes-"))], [])

    def test_before_it_is_uninstalled_all_nodes_are_as_they_were(self) -> None:
        job = by_kind(template())["Job", "infranetes-removal"]
        self.assertEqual(job["metadata"]["annotations"]["helm.sh/hook"], "pre-delete")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        options = parser().parse_args(container["args"])
        self.assertEqual(
            (options.command, options.daemonset), ("remove-everywhere", f"{NAMESPACE}/infranetes-installer")
        )
        self.assertNotIn("Job", {each["kind"] for each in objects(PLAIN.read_text())})

    def test_helms_test_is_a_pod_in_a_vm(self) -> None:
        pod = by_kind(template())["Pod", "infranetes-test"]
        self.assertEqual(pod["metadata"]["annotations"]["helm.sh/hook"], "test")
        self.assertEqual(pod["spec"]["runtimeClassName"], "infranetes")


@needs_helm
class DocumentedTests(SynchronousTestCase):
    """What the pages show, and the dashboard, are what the chart brings."""

    timeout = 600

    def test_the_policies_are_those_of_the_page(self) -> None:
        rendered = by_kind(template(*EVERYTHING))
        policies = {
            key: each for key, each in documented("runtime-classes.md").items() if "Admission" in key[0]
        }
        self.assertEqual(len(policies), 8)
        for key, each in policies.items():
            ours = json.dumps(without_labels(rendered[key]), sort_keys=True).replace("',  '", "', '")
            wanted = json.dumps(each, sort_keys=True)
            self.assertEqual(re.sub(r"\s+", " ", ours), re.sub(r"\s+", " ", wanted), key)

    def test_the_volume_driver_is_that_of_the_page(self) -> None:
        rendered = by_kind(template(*EVERYTHING))
        for key, each in documented("volumes-csi.yaml").items():
            ours = without_labels(rendered[key])
            text = json.dumps(each, sort_keys=True).replace("kube-system", NAMESPACE)
            wanted = json.loads(text)
            if key[0] == "StorageClass":
                ours["metadata"].pop("annotations")
            if key[0] == "DaemonSet":
                ours["spec"]["template"]["metadata"]["labels"].pop("infranetes.io/runtime")
            self.assertEqual(ours, wanted, key)

    def test_the_dashboard_is_grafanas(self) -> None:
        data = by_kind(template(*EVERYTHING))["ConfigMap", "infranetes-dashboard"]["data"]
        self.assertEqual(json.loads(data["infranetes.json"]), json.loads(DASHBOARD.read_text()))

    def test_prometheus_asks_the_address_of_each_node_with_the_token(self) -> None:
        found = by_kind(template(*EVERYTHING))
        monitor = found["ServiceMonitor", "infranetes"]
        (endpoint,) = monitor["spec"]["endpoints"]
        service = found["Service", "infranetes-metrics"]
        self.assertIn(endpoint["port"], [each["name"] for each in service["spec"]["ports"]])
        for name, value in monitor["spec"]["selector"]["matchLabels"].items():
            self.assertEqual(service["metadata"]["labels"][name], value)
        self.assertEqual(
            endpoint["authorization"]["credentials"], {"name": "infranetes-metrics", "key": "token"}
        )
        labels = pod_of(template(*EVERYTHING))["metadata"]["labels"]
        for name, value in service["spec"]["selector"].items():
            self.assertEqual(labels[name], value)
