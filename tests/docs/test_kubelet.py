# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/kubelet.md, as they stand there, for those whom they are for.

The RuntimeClass and its pod are given to a real API server by tests.cluster.test_runtime_classes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml
from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config
from infranetes_common import quantities
from tests.harness.needs import KUBERNETES, ROOT_USER, needs

TREE = Path(__file__).resolve().parents[2]
TOOLS = TREE / "build" / "tools" / "kubernetes"
NOBODY = 65534
KUBELET, KUBEADM = "KubeletConfiguration", "kubeadm.k8s.io"
OF_THE_MACHINE = "failCgroupV1: false\n"  # with it, the machine's cgroups are no fault of a configuration


def examples() -> list[str]:
    """The page's blocks of YAML, each a file of one or more documents."""
    text = (TREE / "docs" / "kubelet.md").read_text()
    return re.findall(r"^```yaml\n(.*?)^```", text, flags=re.M | re.S)


def documents() -> list[dict[str, Any]]:  # Any: YAML
    """All that is in them."""
    return [each for text in examples() for each in yaml.safe_load_all(text)]


@needs(ROOT_USER, KUBERNETES)
class KubeletTests(SynchronousTestCase):
    def said(self, config: str) -> str:
        """What the real kubelet says of a configuration. As nobody it ends right after it has checked it."""
        program = TOOLS / "kubelet"
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        directory.chmod(0o755)
        (directory / "config.yaml").write_text(config + OF_THE_MACHINE)
        opened = os.open(program, os.O_RDONLY)  # it may be where nobody can't look
        self.addCleanup(os.close, opened)
        done = subprocess.run(
            [f"/proc/self/fd/{opened}", f"--config={directory / 'config.yaml'}"],
            check=False,
            capture_output=True,
            text=True,
            pass_fds=(opened,),
            user=NOBODY,
            group=NOBODY,
            extra_groups=(),
            cwd=directory,
            timeout=100,
        )
        self.assertNotEqual(done.returncode, 0)
        return done.stderr

    def faults(self, config: str) -> list[str]:
        """The lines in which kubelet says what is wrong."""
        wrong = ("strict decoding", "failed to validate kubelet configuration", "failed to load")
        return [line for line in self.said(config).splitlines() if any(each in line for each in wrong)]

    def test_its_configuration_is_taken_by_the_real_kubelet(self) -> None:
        found = [text for text in examples() if KUBELET in text and KUBEADM not in text]
        self.assertEqual(len(found), 1)
        self.assertEqual(self.faults(found[0]), [])

    def test_kubelet_would_say_what_is_wrong(self) -> None:
        (config,) = (text for text in examples() if KUBELET in text and KUBEADM not in text)
        self.assertIn("unknown field", "".join(self.faults(config + "runtimeRequestTimeouts: 4m\n")))
        self.assertIn("failed to validate", "".join(self.faults(config + "maxPods: -1\n")))

    def test_it_names_our_socket_and_what_is_the_default_here(self) -> None:
        (config,) = (each for each in documents() if "containerRuntimeEndpoint" in each)
        ours = Config()
        self.assertEqual(config["containerRuntimeEndpoint"], f"unix://{ours.socket_path}")
        self.assertEqual(config["cgroupDriver"], ours.cgroup_driver)
        self.assertEqual(config["maxParallelImagePulls"], ours.images.max_parallel_pulls)


@needs(KUBERNETES)
class KubeadmTests(SynchronousTestCase):
    def validate(self, text: str) -> subprocess.CompletedProcess[str]:
        program = TOOLS / "kubeadm"
        file = Path(self.mktemp())
        file.write_text(text)
        return subprocess.run(
            [str(program), "config", "validate", "--config", str(file)],
            check=False,
            capture_output=True,
            text=True,
        )

    def test_kubeadm_takes_them(self) -> None:
        found = [text for text in examples() if KUBEADM in text]
        self.assertEqual(len(found), 2)
        # What kubeadm otherwise looks for in the network.
        version = subprocess.run(
            [TOOLS / "kubeadm", "version", "-o", "short"], capture_output=True, text=True
        )
        of_the_machine = {
            "InitConfiguration": "localAPIEndpoint: {advertiseAddress: 192.0.2.1}",
            "ClusterConfiguration": f"kubernetesVersion: {version.stdout.strip()}",
        }
        for text in found:
            for kind, line in of_the_machine.items():
                text = text.replace(f"kind: {kind}\n", f"kind: {kind}\n{line}\n")
            done = self.validate(text)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertNotIn("warning", (done.stdout + done.stderr).lower())

    def test_kubeadm_would_say_what_is_wrong(self) -> None:
        (join,) = (text for text in examples() if "JoinConfiguration" in text)
        done = self.validate(join.replace("criSocket", "criSockett"))
        self.assertIn("criSockett", done.stderr + done.stdout)

    def test_they_name_our_socket(self) -> None:
        nodes = [each["nodeRegistration"] for each in documents() if "nodeRegistration" in each]
        self.assertEqual([each["criSocket"] for each in nodes], [f"unix://{Config().socket_path}"] * 2)


class RuntimeClassTests(SynchronousTestCase):
    def test_it_is_of_a_handler_that_is_there_by_default(self) -> None:
        (found,) = (each for each in documents() if each["kind"] == "RuntimeClass")
        (pod,) = (each for each in documents() if each["kind"] == "Pod")
        self.assertEqual(
            found.keys(), {"apiVersion", "kind", "metadata", "handler", "overhead", "scheduling"}
        )
        self.assertIn(found["handler"], Config().runtime_handlers)
        self.assertEqual(pod["spec"]["runtimeClassName"], found["metadata"]["name"])
        self.assertGreater(quantities.units(found["overhead"]["podFixed"]["memory"]), 0)
        self.assertGreater(quantities.thousandths(found["overhead"]["podFixed"]["cpu"]), 0)

    def test_the_workers_label_and_taint_are_those_that_it_is_for(self) -> None:
        (found,) = (each for each in documents() if each["kind"] == "RuntimeClass")
        (join,) = (each for each in documents() if each["kind"] == "JoinConfiguration")
        ((key, value),) = found["scheduling"]["nodeSelector"].items()
        arguments = {each["name"]: each["value"] for each in join["nodeRegistration"]["kubeletExtraArgs"]}
        self.assertEqual(arguments["node-labels"], f"{key}={value}")
        (taint,), (toleration,) = join["nodeRegistration"]["taints"], found["scheduling"]["tolerations"]
        self.assertEqual((taint["key"], taint["effect"]), (toleration["key"], toleration["effect"]))
