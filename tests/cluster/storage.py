# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' sidecars of volume drivers, which run beside kubelet; see docs/persistent-volumes.md."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from infranetes.csi.config import CsiConfig
from tests.cluster.components import API_SERVER, KUBELET_DIRECTORY, Program
from tests.cluster.nodes import Node
from tests.cluster.paths import PROGRAMS, ROOT
from tests.cluster.pki import Authority

PAGES = ("volumes-csi.yaml", "volumes-resizer.yaml", "volumes-snapshotter.yaml")
_ONE_NODE = "volumes-snapshots-one-node.yaml"
_PODS = ("DaemonSet", "Deployment")
_SNAPSHOTS = PROGRAMS / "snapshots.yaml"  # their CustomResourceDefinitions


def manifests(node: Node) -> str:
    """Return the manifests that the docs give a cluster, except the sidecars' pods, and the snapshots' CRDs.

    :param node: the node that has volumes."""
    texts = [_SNAPSHOTS.read_text(), *((ROOT / "docs" / page).read_text() for page in PAGES)]
    texts.append((ROOT / "docs" / _ONE_NODE).read_text().replace("'NODE'", f"'{node.name}'"))
    documents = [
        each for text in texts for each in yaml.safe_load_all(text) if each and each["kind"] not in _PODS
    ]
    return str(yaml.safe_dump_all(documents))


def programs(ca: Authority, node: Node) -> Sequence[Program]:
    """Return the sidecars, with the arguments of the docs and the rights of their service accounts, and the
    cluster's controller for all drivers' snapshots."""
    socket = CsiConfig(KUBELET_DIRECTORY).socket
    admin = ca.kubeconfig("snapshot-controller", API_SERVER, ["system:masters"])
    arguments = [f"--kubeconfig={admin}", "--enable-distributed-snapshotting"]
    controller = [str(PROGRAMS / "snapshot-controller"), *arguments]
    found = [Program("snapshot-controller", controller, restarted=True)]
    for page in PAGES:
        documents = list(yaml.safe_load_all((ROOT / "docs" / page).read_text()))
        (spec,) = [each["spec"]["template"]["spec"] for each in documents if each["kind"] in _PODS]
        (container,) = spec["containers"]
        name = container["image"].rpartition("/")[2].partition(":")[0]
        account = spec["serviceAccountName"]
        user = ca.kubeconfig(f"system:serviceaccount:kube-system:{account}", API_SERVER)
        arguments = [each for each in container["args"] if not each.startswith("--csi-address=")]
        command = ["env", f"NODE_NAME={node.name}", "NAMESPACE=kube-system", str(PROGRAMS / name), *arguments]
        command += [f"--csi-address={socket}", f"--kubeconfig={user}"]
        if "--enable-capacity" in arguments:
            command.append("--capacity-ownerref-level=-1")  # no owner, because it runs in no pod
        found.append(Program(name, command, restarted=True))
    return found
