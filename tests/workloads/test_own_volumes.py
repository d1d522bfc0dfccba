# SPDX-License-Identifier: Apache-2.0
"""What a pod writes to a volume of its own is there for the next one, by kubelet and the daemon's driver."""

from __future__ import annotations

import json
from typing import ClassVar

import yaml

from tests.cluster.case import RUNTIME, Manifest, container, pod, until
from tests.cluster.components import CONTAINERD
from tests.cluster.paths import ROOT
from tests.workloads.case import IDLE, WorkloadCase

VOLUMES = "/var/lib/infranetes/qemu/volumes"
MIB = 1 << 20
GROUP = 2000
# kubelet looks at volumes each minute.
MEASURED_SECONDS = 180.0


def driver() -> Manifest:
    """The CSIDriver of the docs."""
    documents = yaml.safe_load_all((ROOT / "docs" / "volumes-csi.yaml").read_text())
    (found,) = [each for each in documents if each["kind"] == "CSIDriver"]
    return dict(found)


class OwnVolumeCase(WorkloadCase):
    """Each test has a volume and a claim.

    :cvar common: what both say besides. :cvar of_volume: what the volume does. :cvar of_csi: and as CSI's."""

    common: ClassVar[Manifest] = {}
    of_volume: ClassVar[Manifest] = {"mountOptions": ["noatime"]}
    of_csi: ClassVar[Manifest] = {"fsType": "ext4"}

    if RUNTIME == CONTAINERD:
        skip = "containerd's pods have no such volumes"

    def setUp(self) -> None:
        super().setUp()
        file = f"{VOLUMES}/{self.namespace}.raw"
        self.cluster.inside("sh", "-c", self.script(file))
        self.addCleanup(self.cluster.inside, "rm", "-f", file)
        self.apply(driver())

    def script(self, file: str) -> str:
        """What makes the volume."""
        return f"mkdir -p -m 700 {VOLUMES} && umask 077 && truncate --size={64 * MIB} {file}"

    def claimed(self) -> list[Manifest]:
        """The volume, and a claim that only it fulfils."""
        self.addCleanup(self.kubectl, "delete", "persistentvolume", self.namespace, "--wait=false")
        common: Manifest = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": self.namespace,
            **self.common,
        }
        volume = {
            "capacity": {"storage": "64Mi"},
            "csi": {"driver": "infranetes.io", "volumeHandle": self.namespace, **self.of_csi},
            **self.of_volume,
            **common,
        }
        claim = {"resources": {"requests": {"storage": "64Mi"}}, **common}
        return [
            {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
            for kind, name, spec in (
                ("PersistentVolume", self.namespace, volume),
                ("PersistentVolumeClaim", "data", claim),
            )
        ]

    def using(self, name: str, *containers: Manifest) -> Manifest:
        volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
        return pod(name, *containers, volumes=volumes, securityContext={"fsGroup": GROUP})


class VolumeTests(OwnVolumeCase):
    def test_the_next_pod_has_it_once_the_first_has_gone(self) -> None:
        whole = [{"name": "data", "mountPath": "/data"}]
        part = [{"name": "data", "mountPath": "/part", "subPath": "part"}]
        self.apply(
            *self.claimed(),
            self.using(
                "first",
                container("main", IDLE, volumeMounts=whole),
                container("other", IDLE, volumeMounts=part),
            ),
        )
        self.wait_until_ready("first")
        written = "echo kept > /data/part/file && sync && stat -c %g /data && grep ' /data ' /proc/mounts"
        said = self.execute("first", "sh", "-c", written).stdout.decode().splitlines()
        self.assertEqual(said[0], str(GROUP))
        self.assertRegex(said[1], r"^/dev/\w+ /data ext4 rw,.*noatime")
        seen = self.here("exec", "first", "--container", "other", "--", "cat", "/part/file")
        self.assertEqual(seen, "kept\n")

        self.apply(self.using("second", container("main", IDLE, volumeMounts=whole)))
        refusal = "a volume is one pod's at a time"
        until(lambda: refusal in self.here("describe", "pod", "second"), "it is told", 120)

        self.here("delete", "pod", "first", "--timeout=120s", timeout=150)
        self.wait_until_ready("second")
        self.assertEqual(self.execute("second", "cat", "/data/part/file").stdout, b"kept\n")
        self.here("delete", "pod", "second", "--timeout=120s", timeout=150)


class MeasuredTests(OwnVolumeCase):
    def capacity(self) -> int:
        """Of the claim's volume, as kubelet says; 0: it does not yet."""
        node = self.get("pod", "first")["spec"]["nodeName"]
        summary = json.loads(self.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/stats/summary"))
        for found in summary["pods"]:
            for volume in found.get("volume", ()):
                about = volume.get("pvcRef", {})
                if (about.get("namespace"), about.get("name")) == (self.namespace, "data"):
                    return int(volume.get("capacityBytes", 0))
        return 0

    def metrics(self) -> str:
        """kubelet's, for Prometheus."""
        node = self.get("pod", "first")["spec"]["nodeName"]
        return self.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/metrics")

    def test_kubelet_says_how_large_it_is(self) -> None:
        mounts = [{"name": "data", "mountPath": "/data"}]
        self.apply(*self.claimed(), self.using("first", container("main", IDLE, volumeMounts=mounts)))
        self.wait_until_ready("first")
        capacity = int(until(self.capacity, "kubelet has measured it", MEASURED_SECONDS))
        self.assertTrue(32 * MIB < capacity <= 64 * MIB, capacity)
        labels = f'{{namespace="{self.namespace}",persistentvolumeclaim="data"}}'
        self.assertIn(f"kubelet_volume_stats_capacity_bytes{labels} ", self.metrics())
        self.here("delete", "pod", "first", "--timeout=120s", timeout=150)


class RawVolumeTests(OwnVolumeCase):
    """The same with the disk itself as a device."""

    common: ClassVar[Manifest] = {"volumeMode": "Block"}
    of_volume: ClassVar[Manifest] = {}
    of_csi: ClassVar[Manifest] = {}

    def loop_devices(self) -> str:
        """The node's that stand for the volume, and kubelet's locks on them."""
        script = (
            "for each in /sys/block/loop*/loop/backing_file; do name=${each#/sys/block/}; name=${name%%/*}; "
            f"grep -l '/{self.namespace}/' $each; "
            f"head -c 4096 /dev/$name | grep -q '\"{self.namespace}\"' && echo /dev/$name; done; true"
        )
        return self.cluster.inside("sh", "-c", script)

    def test_the_next_pod_has_it_once_the_first_has_gone(self) -> None:
        devices = [{"name": "data", "devicePath": "/dev/xvda"}]
        self.apply(*self.claimed(), self.using("first", container("main", IDLE, volumeDevices=devices)))
        self.wait_until_ready("first")
        self.assertIn("/dev/loop", self.loop_devices())
        written = "test -b /dev/xvda && echo kept | dd of=/dev/xvda bs=512 conv=sync 2>/dev/null"
        self.execute("first", "sh", "-c", written)
        self.here("delete", "pod", "first", "--timeout=120s", timeout=150)

        self.apply(self.using("second", container("main", IDLE, volumeDevices=devices)))
        self.wait_until_ready("second")
        seen = self.execute("second", "head", "-c", "5", "/dev/xvda").stdout
        self.assertEqual(seen, b"kept\n")
        self.here("delete", "pod", "second", "--timeout=120s", timeout=150)
        until(lambda: not self.loop_devices(), "no loop device is left", 120)


class FlexVolumeTests(OwnVolumeCase):
    """The same by a FlexVolume, which the driver makes when a pod asks for it."""

    def script(self, file: str) -> str:
        return f"test ! -e {file}"

    def using(self, name: str, *containers: Manifest) -> Manifest:
        options = {"volumeID": self.namespace, "size": "64Mi", "format": "ext4"}
        flex = {"driver": "infranetes.io/volume", "options": options}
        volumes = [{"name": "data", "flexVolume": flex}]
        return pod(name, *containers, volumes=volumes, securityContext={"fsGroup": GROUP})

    def test_the_next_pod_has_what_the_first_wrote(self) -> None:
        mounts = [{"name": "data", "mountPath": "/data"}]
        part = [{"name": "data", "mountPath": "/part", "subPath": "part", "readOnly": True}]
        self.apply(
            self.using(
                "first",
                container("main", IDLE, volumeMounts=mounts),
                container("other", IDLE, volumeMounts=part),
            )
        )
        self.wait_until_ready("first")
        written = "echo kept > /data/part/file && stat -c %g /data && df -k /data | tail -1"
        said = self.execute("first", "sh", "-c", written).stdout.decode().splitlines()
        self.assertEqual(said[0], str(GROUP))
        self.assertTrue(32 * 1024 < int(said[1].split()[1]) <= 64 * 1024, said[1])
        seen = self.here("exec", "first", "--container", "other", "--", "cat", "/part/file")
        self.assertEqual(seen, "kept\n")
        self.here("delete", "pod", "first", "--timeout=120s", timeout=150)

        self.apply(self.using("second", container("main", IDLE, volumeMounts=mounts)))
        self.wait_until_ready("second")
        self.assertEqual(self.execute("second", "cat", "/data/part/file").stdout, b"kept\n")
        self.here("delete", "pod", "second", "--timeout=120s", timeout=150)
