# SPDX-License-Identifier: Apache-2.0
"""The promises that Kubernetes makes to running pods."""

from __future__ import annotations

import time

from tests.cluster.case import DEBIAN, ClusterCase, container, host_path, pod, reasons, states, until

WEB = "mkdir -p /www && echo {page} > /www/index.html && exec httpd -f -p 8080 -h /www"
# Listens until it is told to close.
CLOSING = "httpd -f -p 8080 & until [ -e /tmp/close ]; do sleep 0.2; done; kill $!; exec sleep 1000"


def web(page: str = "hello", **fields: object) -> dict[str, object]:
    """Return a container with a web server that serves `page`."""
    return container("web", WEB.format(page=page), ports=[{"containerPort": 8080}], **fields)


class PodTests(ClusterCase):
    def deployment(self, page: str) -> dict[str, object]:
        probe = {"httpGet": {"port": 8080}, "periodSeconds": 1}
        template = pod("web", web(page, readinessProbe=probe), restartPolicy="Always")
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web"},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": {"app": "web"}},
                "template": {"metadata": {"labels": {"app": "web"}}, "spec": template["spec"]},
            },
        }

    def test_a_deployment_serves_and_is_rolled_over(self) -> None:
        self.apply(
            self.deployment("first"),
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "web"},
                "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
            },
        )
        self.here("rollout", "status", "deployment/web", "--timeout=120s", timeout=150)
        addresses = [each["status"]["podIP"] for each in self.get("pods", "-l", "app=web")["items"]]
        self.assertEqual(len(set(addresses)), 2)
        for address in addresses:
            page = self.cluster.inside("busybox", "wget", "-q", "-O", "-", f"http://{address}:8080/")
            self.assertEqual(page, "first\n")
        # A pod reaches the Service by its name, without kube-proxy. (With -T, busybox' wget crashes.)
        self.apply(pod("client", container("client", "wget -q -O - http://web/")))
        self.wait_for_phase("client", "Succeeded")
        self.assertEqual(self.logs("client"), "first\n")
        self.apply(self.deployment("second"))
        self.here("rollout", "status", "deployment/web", "--timeout=180s", timeout=210)
        serving = self.get("pods", "-l", "app=web", "--field-selector=status.phase=Running")["items"]
        new = [each for each in serving if "deletionTimestamp" not in each["metadata"]]
        for each in new:
            url = f"http://{each['status']['podIP']}:8080/"
            self.assertEqual(self.cluster.inside("busybox", "wget", "-q", "-O", "-", url), "second\n")
        self.assertEqual(len(new), 2)

    def test_probes_of_every_kind_decide(self) -> None:
        often = {"periodSeconds": 1, "failureThreshold": 2}
        served = {"httpGet": {"port": 8080, "path": "/index.html"}, **often}
        self.apply(
            pod("http", web(readinessProbe=served)),
            pod("tcp", container("main", CLOSING, readinessProbe={"tcpSocket": {"port": 8080}, **often})),
            pod(
                "exec",
                container(
                    "main",
                    "touch /tmp/ok; exec sleep 1000",
                    readinessProbe={"exec": {"command": ["test", "-e", "/tmp/ok"]}, **often},
                    livenessProbe={"exec": {"command": ["test", "!", "-e", "/tmp/ill"]}, **often},
                ),
                restartPolicy="Always",
            ),
        )
        for name in ("http", "tcp", "exec"):
            self.wait_until_ready(name)
        self.execute("http", "rm", "/www/index.html")
        self.wait("pod/http", "condition=Ready=false", 60)
        self.execute("tcp", "touch", "/tmp/close")
        self.wait("pod/tcp", "condition=Ready=false", 60)
        self.execute("exec", "rm", "/tmp/ok")
        self.wait("pod/exec", "condition=Ready=false", 60)
        self.execute("exec", "touch", "/tmp/ill")
        restarted = "jsonpath={.status.containerStatuses[0].restartCount}=1"
        self.wait("pod/exec", restarted)
        self.wait_until_ready("exec")
        self.assertEqual(states(self.get("pod", "tcp"))["main"]["restartCount"], 0)

    def test_what_takes_too_much_memory_is_killed_for_it(self) -> None:
        limits = {"limits": {"memory": "32Mi"}}
        greedy = container("greedy", "dd if=/dev/zero of=/dev/null bs=200M count=1", resources=limits)
        self.apply(pod("oom", greedy, container("modest", "sleep 8; echo survived")))
        done = self.wait_for_phase("oom", "Failed")
        self.assertEqual(reasons(done, ["greedy", "modest"]), ["OOMKilled", "Completed"])
        self.assertEqual(states(done)["greedy"]["state"]["terminated"]["exitCode"], 137)
        self.assertEqual(self.logs("oom", "--container=modest"), "survived\n")

    def test_a_grace_period_is_given_and_no_longer(self) -> None:
        said = self.directory()
        mounts = [{"name": "said", "mountPath": "/said"}]
        polite = container(
            "polite",
            "trap 'sleep 2; echo bye >> /said/polite; exit 0' TERM; while true; do sleep 0.1; done",
            volumeMounts=mounts,
            lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "echo soon >> /said/polite"]}}},
        )
        deaf = container("deaf", "trap '' TERM; while true; do sleep 0.1; done")
        volumes = [host_path("said", said)]
        self.apply(
            pod("polite", polite, volumes=volumes, terminationGracePeriodSeconds=60),
            pod("deaf", deaf, terminationGracePeriodSeconds=3),
        )
        for name in ("polite", "deaf"):
            self.wait_until_ready(name)
        took = {}
        for name in ("polite", "deaf"):
            begun = time.monotonic()
            self.here("delete", "pod", name, "--timeout=100s", timeout=120)
            took[name] = time.monotonic() - begun
        self.assertEqual((said / "polite").read_text(), "soon\nbye\n")
        self.assertGreater(took["polite"], 2)
        self.assertLess(took["polite"], 40)  # it ends itself before the minute after which it would be killed
        self.assertGreater(took["deaf"], 3)
        self.assertLess(took["deaf"], 40)

    def test_exec_passes_input_output_and_exit_code(self) -> None:
        self.apply(pod("box", container("main", "exec sleep 1000")))
        self.wait_until_ready("box")
        done = self.execute("box", "sh", "-c", "cat; echo no >&2; exit 3", given=b"through and back")
        self.assertEqual(done.stdout, b"through and back")
        self.assertIn(b"no\n", done.stderr)
        self.assertEqual(done.returncode, 3)
        megabyte = bytes(range(256)) * 4096
        self.assertEqual(self.execute("box", "cat", given=megabyte).stdout, megabyte)

    def test_a_changed_configmap_reaches_a_running_container(self) -> None:
        self.here("create", "configmap", "settings", "--from-literal=colour=red")
        script = (
            "while true; do now=$(cat /etc/settings/colour);"
            ' [ "$now" = "$last" ] || echo "$now"; last=$now; sleep 0.5; done'
        )
        mounts = [{"name": "settings", "mountPath": "/etc/settings"}]
        volumes = [{"name": "settings", "configMap": {"name": "settings"}}]
        self.apply(pod("reader", container("main", script, volumeMounts=mounts), volumes=volumes))
        self.wait_until_ready("reader")
        until(lambda: self.logs("reader") == "red\n", "the first version is read", 30)
        self.here("patch", "configmap", "settings", "--patch", '{"data": {"colour": "green"}}')
        until(lambda: self.logs("reader") == "red\ngreen\n", "the second version is read", 90)

    def test_an_image_of_80_mib_runs(self) -> None:
        script = "import json, ssl, sys; print(json.dumps([sys.version_info.major, ssl.HAS_TLSv1_3]))"
        large = {"name": "main", "image": DEBIAN, "command": ["python3", "-c", script]}
        begun = time.monotonic()
        self.apply(pod("large", large))
        self.wait_for_phase("large", "Succeeded", 600)
        print(f"[{time.monotonic() - begun:.0f} s until it has run]", end=" ")
        self.assertEqual(self.logs("large"), "[3, true]\n")
