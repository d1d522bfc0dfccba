# SPDX-License-Identifier: Apache-2.0
"""Answers of Compute Engine that were recorded by libcloud's own tests.

They are fetched with pip, pinned, into build/: the wheel has the same recordings as its release's source
distribution, and nothing has to be built.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.clouds.agent_processes import ROOT

WHEEL = "apache_libcloud-3.9.1-py3-none-any.whl"
PINNED = (
    "apache-libcloud==3.9.1 --hash=sha256:362806efe3602a781afa0b0c8ad2e8963a708c8d5957fb999735c1cc1e0762d2\n"
)
_DIRECTORY = "libcloud/test/compute/fixtures/gce/"
Shape = dict[str, set[str]]
"""Types by path: `networkInterfaces[].networkIP` is a `str`."""


def answers() -> list[Any]:
    """Return all answers."""
    with zipfile.ZipFile(wheel(WHEEL, PINNED)) as archive:
        names = [
            name for name in archive.namelist() if name.startswith(_DIRECTORY) and name.endswith(".json")
        ]
        return [json.loads(archive.read(name)) for name in names]


def wheel(name: str, pinned: str) -> Path:
    """Return a wheel, which is fetched the first time. :param pinned: its release, with its hash."""
    directory = ROOT / "build" / "recorded"
    if not (directory / name).exists():
        directory.mkdir(parents=True, exist_ok=True)
        python = sys.executable if find_spec("pip") else str(ROOT / ".venv" / "bin" / "python")
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        with tempfile.TemporaryDirectory(dir=directory) as fetched:
            requirements = Path(fetched) / "pinned.txt"
            requirements.write_text(pinned)
            command = [python, "-m", "pip", "download", *options, "--dest", fetched, "-r", str(requirements)]
            subprocess.run(command, check=True, cwd=ROOT)
            (Path(fetched) / name).rename(directory / name)
    return directory / name


def resources(answer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the resources in an answer with their kinds."""
    if isinstance(answer, dict):
        if isinstance(answer.get("kind"), str):
            yield answer["kind"], answer
        for value in answer.values():
            yield from resources(value)
    elif isinstance(answer, list):
        for value in answer:
            yield from resources(value)


def shape(resource: Any) -> Shape:
    """Return the types in a resource, without resources within it. Labels may have any names."""
    found: Shape = {}
    for key, value in resource.items():
        _add(found, "*" if "/" in key else key, value)
    return found


def _add(found: Shape, path: str, value: Any) -> None:
    found.setdefault(path, set()).add(type(value).__name__)
    if isinstance(value, list):
        for each in value:
            _add(found, f"{path}[]", each)
    elif isinstance(value, dict) and "kind" not in value and not path.endswith("labels"):
        for key, each in value.items():
            _add(found, f"{path}.{'*' if '/' in key else key}", each)


def merge(into: Shape, more: Shape) -> None:
    """Add a shape to another."""
    for path, types in more.items():
        into.setdefault(path, set()).update(types)
