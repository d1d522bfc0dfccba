#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile the .proto files with protoc, for `setup.py` and `make proto`.

Without arguments: in infranetes_common/wire, descriptors.binpb, which the daemons load, and the modules by
which services are called and served, such as cri_rpcs.py (see rpcs.py). With --stubs: also cri.pyi and the
like, with which mypy checks how messages are used. Files are replaced whole, so that whoever is reading them
sees the old or the new one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import rpcs

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "infranetes_common" / "wire"
SOURCES = sorted(HERE.glob("*.proto"))
DESCRIPTORS = PACKAGE / "descriptors.binpb"


def protoc(*arguments: str) -> None:
    """Run protoc over every source; it writes its own errors, file and line, to stderr."""
    command = shutil.which("protoc")
    if command is None:
        raise SystemExit("protoc is missing: apt-get install protobuf-compiler")
    names = [source.name for source in SOURCES]
    done = subprocess.run([command, f"-I{HERE}", *arguments, *names], cwd=HERE, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"protoc failed with exit code {done.returncode}")


def replace(path: Path, content: bytes) -> None:
    """Put `content` in place of `path` in one step."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as new:
        new.write(content)
    os.chmod(new.name, 0o644)
    os.replace(new.name, path)


def compile_descriptors(scratch: Path) -> None:
    """One descriptor set of all files."""
    out = scratch / DESCRIPTORS.name
    protoc("--include_imports", f"--descriptor_set_out={out}")
    replace(DESCRIPTORS, out.read_bytes())


def compile_rpcs() -> None:
    """A module for each file that has services."""
    for source in SOURCES:
        if (module := rpcs.module(source.stem, source.read_text())) is not None:
            replace(PACKAGE / f"{source.stem}_rpcs.py", module.encode())


def stub(source: Path, generated: str) -> str:
    """protoc's own stub, made fit for `mypy --strict` and for modules made at run time.

    - other files' messages come from their module in infranetes_common.wire
    - a message is given as that message, never as an untyped dict
    - the service descriptors, which protoc leaves out, are there
    """
    text = re.sub(
        r"^import (\w+)_pb2 as ", r"from infranetes_common.wire import \1 as ", generated, flags=re.M
    )
    text = re.sub(r"^( *)__slots__ = \[.*\]$", r"\1__slots__: list[str]", text, flags=re.M)
    text = re.sub(r"_Union\[([\w.]+), _Mapping\]", r"\1", text)
    services = re.findall(r"^service (\w+)", source.read_text(), flags=re.M)
    return text + "".join(f"\n{name}: _descriptor.ServiceDescriptor\n" for name in services)


def compile_stubs(scratch: Path) -> None:
    """A .pyi beside each module that has a .proto."""
    protoc(f"--pyi_out={scratch}")
    for source in SOURCES:
        generated = (scratch / f"{source.stem}_pb2.pyi").read_text()
        replace(PACKAGE / f"{source.stem}.pyi", stub(source, generated).encode())


def up_to_date() -> bool:
    """There is a descriptor set, made last of all, and no source is newer: protoc can be spared."""
    if not DESCRIPTORS.exists():
        return False
    made = DESCRIPTORS.stat().st_mtime
    return all(source.stat().st_mtime <= made for source in (*SOURCES, *HERE.glob("*.py")))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stubs", action="store_true", help="also write the stubs for mypy")
    parser.add_argument("--if-needed", action="store_true", help="do nothing when no source is newer")
    options = parser.parse_args(arguments)
    if options.if_needed and not options.stubs and up_to_date():
        return
    with tempfile.TemporaryDirectory() as scratch:
        compile_rpcs()
        if options.stubs:
            compile_stubs(Path(scratch))
        compile_descriptors(Path(scratch))


if __name__ == "__main__":
    main(sys.argv[1:])
