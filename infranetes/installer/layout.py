# SPDX-License-Identifier: Apache-2.0
"""Where things are on a node, and what is in the files that the installer makes there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from infranetes.installer.kubelets import Kubelet
from infranetes_common.errors import InvalidArgument

HOME = "/opt/infranetes"
CURRENT = f"{HOME}/current"
"""A symbolic link to the tree that the node runs, by which programs are found."""
UNIT = "infranetes.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
CONFIGURATION = "/etc/infranetes/infranetes.toml"
METRICS_TOKEN = "/etc/infranetes/metrics-token"  # noqa: S105  its path
SOCKET = "/run/infranetes/infranetes.sock"
STATE = ("/var/lib/infranetes", "/run/infranetes")
_TREE = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+~-]{0,99}")
_VALUE = re.compile(r"[^\"\\\x00-\x1f\x7f]{1,200}")
_UNIT_SOURCE = "/usr/share/infranetes/infranetes.service"
_SERVICE_DIRECTORY = "/usr/share/infranetes"


def is_tree(name: str) -> bool:
    """Return whether this can be the name of a tree's directory."""
    return _TREE.fullmatch(name) is not None and name != "current"


def tree(name: str) -> str:
    """Return a tree's directory."""
    return f"{HOME}/{name}"


def unit(template: str, name: str) -> str:
    """Return the unit of the daemon of a tree, made of the one that the packages have.

    It names the tree itself, not `current`: a unit and its daemon are never of two releases."""
    home = tree(name)
    programs = f"{home}/usr/bin"
    text = re.sub(
        r"^ExecStart=/usr/bin/twistd3 ",
        f"ExecStart={programs}/python3 -I {programs}/twistd ",
        template,
        flags=re.M,
    )
    text = re.sub(r"^Wants=network-online\.target .*$", "Wants=network-online.target", text, flags=re.M)
    text = re.sub(r"^Documentation=.*\n", "", text, flags=re.M)
    return text.replace("[Service]\n", "[Service]\nEnvironment=PYTHONDONTWRITEBYTECODE=1\n", 1)


def configuration(template: str, kubelet: Kubelet, node: str, node_ip: str) -> str:
    """Return the daemon's configuration for this node.

    :param template: the cluster's, in which `@NAME@` stands for what differs from node to node.
    :raise InvalidArgument: it has another `@NAME@`, or a value can't stand between quotes."""
    values = {
        "NODE": node,
        "NODE_IP": f"[{node_ip}]" if ":" in node_ip else node_ip,
        "RUNTIME_SOCKET": kubelet.kind.runtime,
        "KUBELET_DIR": kubelet.kind.kubelet_dir,
        "GUEST_IMAGES": f"{STATE[0]}/guest",
    }

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            known = ", ".join(f"@{name}@" for name in values)
            raise InvalidArgument(
                f"the configuration has @{match[1]}@, which stands for nothing; there are {known}"
            )
        if not _VALUE.fullmatch(values[match[1]]):
            raise InvalidArgument(f"{values[match[1]]!r} can't be @{match[1]}@ of the configuration")
        return values[match[1]]

    return re.sub(r"@([A-Z_]+)@", value, template)


def files(
    templates: Mapping[str, str], name: str, configured: str, token: str, *, cni: bool, csi: bool
) -> dict[str, tuple[str, str]]:
    """Return the files of the daemon, each with what it is for and its text.

    :param templates: of the tree, by their names: the unit and its drop-ins.
    :param token: the one by which metrics are asked for; "": none."""
    found = {
        CONFIGURATION: ("configuration", configured),
        UNIT_FILE: ("unit", unit(templates["infranetes.service"], name)),
    }
    if token:
        found[METRICS_TOKEN] = ("token", token)
    for wanted, drop in ((cni, "cni"), (csi, "csi")):
        if wanted:
            found[f"{UNIT_FILE}.d/{drop}.conf"] = ("drop-in", templates[f"systemd-{drop}.conf"])
    return found
