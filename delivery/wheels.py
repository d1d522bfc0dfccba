# SPDX-License-Identifier: Apache-2.0
"""Build what pip installs: `python -m delivery.wheels DIRECTORY`, which `make wheel` calls with dist/.

Two distributions, infranetes and txgrpc, each as an sdist and as the wheel that is made of that sdist: no
release is made whose sdist can't be built. They are built from a copy of what git knows, since setuptools
leaves directories where it builds. Of the same tree and `SOURCE_DATE_EPOCH` they are the same bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
# Each distribution's directory in the tree.
DISTRIBUTIONS = {"txgrpc": "txgrpc", "infranetes": "."}
BUILD = ("build>=1.0", "setuptools>=68", "wheel>=0.40")
_MODE = {True: 0o755, False: 0o644}


def copied(target: Path) -> None:
    """Copy the files that git knows, or would if they were added."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=TREE, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source = TREE / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def epoch() -> int:
    """Return the time of all that is built: the last commit's, unless SOURCE_DATE_EPOCH says one."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    shown = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=TREE, check=True, capture_output=True, text=True
    )
    return int(shown.stdout)


def tools(directory: Path) -> Path:
    """Return a Python that has what builds, in an environment of its own that is made once.

    `make tools` makes it, for tests fetch nothing."""
    python = directory / "bin" / "python"
    if not (directory / "bin" / "pyproject-build").exists():  # what pip installs last
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *BUILD], check=True)
    return python


def repacked(archive: Path, when: int) -> None:
    """Give an sdist's members owners, modes, order and times that are the same whoever builds it."""
    new = archive.with_suffix(".new")
    with tarfile.open(archive) as old, tempfile.TemporaryFile() as plain:
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for member in sorted(old.getmembers(), key=lambda each: each.name):
                member.mtime, member.pax_headers = when, {}
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                member.mode = _MODE[member.isdir() or bool(member.mode & 0o100)]
                tar.addfile(member, old.extractfile(member) if member.isreg() else None)
        plain.seek(0)
        with new.open("wb") as file:
            subprocess.run(["gzip", "-9n"], stdin=plain, stdout=file, check=True)
    new.replace(archive)


def build(python: Path, source: Path, output: Path, when: int) -> list[Path]:
    """Build a distribution's sdist, and a wheel of that; return both."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(when), "PYTHONHASHSEED": "0"}
    made = [str(python), "-m", "build", "--no-isolation", "--outdir", str(output)]
    _quietly([*made, "--sdist", source], environment)
    (sdist,) = output.glob("*.tar.gz")
    repacked(sdist, when)
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(sdist) as tar:
        tar.extractall(scratch, filter="data")
        (unpacked,) = Path(scratch).iterdir()
        _quietly([*made, "--wheel", unpacked], environment)
    return [sdist, *output.glob("*.whl")]


def _quietly(command: Sequence[str | Path], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, env=environment, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout[-6000:]}\nthe build failed: {' '.join(map(str, command))}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Build them all into the directory that is named, in place of older ones."""
    parser = argparse.ArgumentParser(prog="python -m delivery.wheels", description=__doc__)
    parser.add_argument("directory", type=Path)
    target = parser.parse_args(arguments).directory.absolute()
    target.mkdir(parents=True, exist_ok=True)
    python = tools(TREE / "build" / "wheel-tools")
    with tempfile.TemporaryDirectory(prefix="wheels-") as scratch:
        tree = Path(scratch) / "tree"
        copied(tree)
        for name, directory in DISTRIBUTIONS.items():
            output = Path(scratch) / name
            for file in build(python, tree / directory, output, epoch()):
                for old in target.glob(
                    f"{name}-*{''.join(file.suffixes[-2:]) if file.suffix == '.gz' else '.whl'}"
                ):
                    old.unlink()
                shutil.copy(file, target)
                print(f"{target / file.name}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
