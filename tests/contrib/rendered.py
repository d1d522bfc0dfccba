# SPDX-License-Identifier: Apache-2.0
"""The chart as helm renders it. ``python -m tests.contrib.rendered`` prints the manifests made of it."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

TREE = Path(__file__).resolve().parents[2]
CHART = TREE / "contrib" / "helm" / "infranetes"
PLAIN = TREE / "contrib" / "kubernetes" / "infranetes.yaml"
HELM = TREE / "build" / "tools" / "helm"
NAMESPACE = "infranetes-system"
KUBERNETES = "1.36.0"
_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# Made of the chart in contrib/helm/infranetes by `tests/contrib/helm render`: change that instead.
#
# Replace registry.example/infranetes by where the image of `make oci` was pushed to. Then, with NODE's name:
#
#     kubectl apply -f infranetes.yaml
#     kubectl label node NODE infranetes.io/install=true
#
# docs/install-cluster.md says what that does, and how it is taken back before this file is deleted.
"""


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm, in a home of its own."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "PATH": os.environ["PATH"]}
        return subprocess.run(
            [HELM, *arguments], check=False, capture_output=True, text=True, env=environment, timeout=60
        )


def template(*settings: str, files: Sequence[Path] = (), hooks: bool = True) -> str:
    """Return what the chart renders to.

    :raise AssertionError: it does not; has helm's words."""
    flags = [flag for each in settings for flag in ("--set", each)]
    flags += [flag for each in files for flag in ("--values", str(each))]
    where = ("--namespace", NAMESPACE, "--kube-version", KUBERNETES)
    done = helm("template", "infranetes", str(CHART), *where, *flags, *(() if hooks else ("--no-hooks",)))
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:  # Any: YAML
    """Return the objects of rendered YAML."""
    return [each for each in yaml.safe_load_all(text) if each]


def by_kind(text: str) -> Mapping[tuple[str, str], dict[str, Any]]:
    """Return the objects by kind and name."""
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects(text)}
    assert len(found) == len(objects(text)), "two objects have one name"
    return found


def plain() -> str:
    """Return the manifests for those who have no helm: without hooks, and with the namespace."""
    text = template("namespace.create=true", hooks=False)
    text = re.sub(r"^# (Source|SPDX-License-Identifier): .*\n", "", text, flags=re.M)
    text = text.replace("app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kubectl")
    text = re.sub(r"(?:^---\n)+(?=---\n|\Z)", "", re.sub(r"\n{2,}", "\n", text), flags=re.M)
    text = re.sub(r"(?:^---\n(?:#.*\n)*)+(?=---\n|\Z)", "", text, flags=re.M)
    return _HEAD + text


if __name__ == "__main__":
    print(plain(), end="")
