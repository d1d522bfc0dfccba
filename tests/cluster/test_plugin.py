# SPDX-License-Identifier: Apache-2.0
"""`kubectl infranetes` by its page: two nodes, and an API server that reviews tokens and rights."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.cluster.case import Cluster, ClusterCase, Manifest, container, pod, until
from tests.cluster.components import API_SERVER, CLOUD, rights
from tests.harness.durations import slow

ASLEEP = container("main", "sleep 3600")
SYSTEM = "kube-system"


def bound(kind: str, role: str, namespace: str, account: str) -> Manifest:
    """Return the binding of a Role or ClusterRole to an account of that namespace, for that namespace."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"{account}-{role}", "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "namespace": namespace, "name": account}],
    }


@slow(75, "a cluster of two nodes is started")
class PluginTests(ClusterCase):
    """A team's namespace with a person and the account whose rights are shown, and pods on both nodes."""

    def running(self) -> Cluster:
        cluster = Cluster("plugin", "--nodes", "2", "--provider", CLOUD)
        self.addCleanup(cluster.stop)
        return cluster.start().wait_until_ready()

    def infranetes(self, *words: str, user: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the plug-in, as the administrator or by another kubeconfig."""
        flags = [f"--kubeconfig={user}"] if user else []
        command = [str(self.cluster.paths.kubectl), "infranetes", *words, *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def shown(self, *words: str, user: Path | None = None) -> Any:  # Any: JSON
        done = self.infranetes(*words, "--output=json", user=user)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def refused(self, *words: str, user: Path | None = None) -> str:
        """Run the plug-in, which fails; return why. No pod is shown."""
        done = self.infranetes(*words, user=user)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertNotRegex(done.stdout, r"\b(one|two)\b")
        return done.stderr

    def person(self, name: str) -> Path:
        """Make a person of the team's, who may do nothing yet; return the kubeconfig."""
        self.here("create", "serviceaccount", name)
        config = json.loads(self.kubectl("config", "view", "--raw", "--output=json"))
        token = self.here("create", "token", name).strip()
        path = self.directory() / name
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{**config["clusters"][0], "name": "cluster"}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [
                {"name": "team", "context": {"cluster": "cluster", "user": name, "namespace": self.namespace}}
            ],
            "current-context": "team",
        }
        path.write_text(json.dumps(document))
        return path

    def test_what_is_shown_is_what_the_accounts_rights_are(self) -> None:
        self.assertIn("infranetes-viewer", self.refused("pods"))  # the page's manifests are not there yet
        self.kubectl("apply", "--filename", "-", given=rights("kubectl-infranetes.md").encode())
        self.apply(pod("one", ASLEEP, nodeName="node"), pod("two", ASLEEP, nodeName="node2"))
        for name in ("one", "two"):
            self.wait_until_ready(name)
        self.of_the_administrator()
        person = self.person("person")
        self.assertIn('cannot list resource "nodes"', self.refused("pods", user=person))
        self.may_see_nodes("person")
        self.assertIn("serviceaccounts/token", self.refused("pods", user=person))
        self.of_a_team(person)
        self.when_a_node_is_away()

    def of_the_administrator(self) -> None:
        found = {each["name"]: each["node"] for each in self.shown("pods", "-n", self.namespace)["pods"]}
        self.assertEqual(found, {"one": "node", "two": "node2"})
        everywhere = self.shown("pods", "-A")["pods"]
        self.assertLessEqual({"one", "two"}, {each["name"] for each in everywhere})
        told = self.infranetes("describe", "pod", "two", "-n", self.namespace)
        self.assertEqual(told.returncode, 0, told.stderr)
        self.assertIn(f"{self.namespace}/two ", told.stdout)
        until(
            lambda: (
                {"one", "two"} <= {each["name"] for each in self.shown("top", "-n", self.namespace)["pods"]}
            ),
            "the pods' usage is shown",
            60,
        )
        said = self.refused("pods", "-A", "--audience", "https://kubernetes.default.svc.cluster.local")
        self.assertRegex(said, r"node: .*\(401\)")
        self.assertRegex(said, r"node2: .*\(401\)")

    def may_see_nodes(self, name: str) -> None:
        """Give a person the right to see nodes and the team's pods, as any user of a cluster may."""
        role = f"nodes-{self.namespace}"
        self.kubectl("create", "clusterrole", role, "--verb=get,list", "--resource=nodes")
        self.addCleanup(self.kubectl, "delete", "clusterrole", role)
        whom = f"--serviceaccount={self.namespace}:{name}"
        self.kubectl("create", "clusterrolebinding", role, f"--clusterrole={role}", whom)
        self.addCleanup(self.kubectl, "delete", "clusterrolebinding", role)
        self.apply(bound("ClusterRole", "view", self.namespace, name))

    def of_a_team(self, person: Path) -> None:
        """The team has an account of its own, with the ClusterRole `view` in its namespace."""
        self.here("create", "serviceaccount", "viewer")
        self.here("create", "role", "token", "--verb=create", "--resource=serviceaccounts/token",
                  "--resource-name=viewer")  # fmt: skip
        self.apply(bound("Role", "token", self.namespace, "person"))
        account = f"--service-account={self.namespace}/viewer"
        said = self.refused("pods", account, user=person)
        self.assertIn("may not list pods", said)
        self.assertIn("(403)", said)
        self.apply(bound("ClusterRole", "view", self.namespace, "viewer"))

        def sees() -> bool:
            done = self.infranetes("pods", "-q", account, user=person)
            return done.returncode == 0 and len(done.stdout.split()) == 2

        until(sees, "what an account may see is followed within seconds", 30)
        self.assertIn("one", self.infranetes("describe", "pod", "one", account, user=person).stdout)
        for words in (("pods", "-A"), ("pods", "-n", SYSTEM), ("top", "-A")):
            self.assertIn("(403)", self.refused(*words, account, user=person))
        # Its token is for the daemons alone: what it may do at the API server is nothing to it.
        token = self.here("create", "token", "viewer", "--audience=infranetes").strip()
        asked = self.cluster.kubectl("get", "pods", f"--token={token}", "--kubeconfig=/dev/null",
                                     f"--server={API_SERVER}", "--insecure-skip-tls-verify")  # fmt: skip
        self.assertIn(b"Unauthorized", asked.stderr)

    def when_a_node_is_away(self) -> None:
        stopped = self.cluster.paths.stopped("infranetes-node2")
        stopped.touch()
        self.addCleanup(stopped.unlink, missing_ok=True)
        self.cluster.kill("infranetes-node2")
        done = self.infranetes("pods", "-n", self.namespace)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"(?m)^\S* *one ")
        self.assertRegex(done.stderr, "node node2: .*can't be asked")
