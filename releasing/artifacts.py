# SPDX-License-Identifier: Apache-2.0
"""What is published of a release: source, packages, SBOMs, their checksums, and where they come from."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

SUMS = "SHA256SUMS"
PROVENANCE = "provenance.json"
_BUILD = "https://infranetes.invalid/releasing/v1"  # names the kind of build; nothing is there to fetch


def digests(directory: Path) -> Mapping[str, str]:
    """Return the SHA-256 of each file of a directory, by name."""
    return {
        each.name: hashlib.sha256(each.read_bytes()).hexdigest()
        for each in sorted(directory.iterdir())
        if each.is_file() and each.name != SUMS
    }


def sums(found: Mapping[str, str]) -> str:
    """Return the file that `sha256sum --check` takes."""
    return "".join(f"{digest}  {name}\n" for name, digest in found.items())


def provenance(
    subjects: Mapping[str, str], commit: str, version: str, commands: Sequence[str], when: datetime
) -> str:
    """Return an in-toto statement, of SLSA's form: which commit the files are of, and what made them.

    :param subjects: the files' SHA-256.
    """
    source = {"uri": f"git+infranetes@v{version}", "digest": {"gitCommit": commit}}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in subjects.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD,
                "externalParameters": {"version": version, "commands": list(commands)},
                "resolvedDependencies": [source],
            },
            "runDetails": {
                "builder": {"id": _BUILD, "version": {"python": platform.python_version()}},
                "metadata": {"startedOn": f"{when:%Y-%m-%dT%H:%M:%SZ}"},
            },
        },
    }
    return json.dumps(statement, indent=2) + "\n"
