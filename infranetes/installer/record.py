# SPDX-License-Identifier: Apache-2.0
"""What the installer has done to a node: written before it is done, so that whoever comes next can take "
"it back."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from pathlib import Path

import attrs

from infranetes_common.concurrency import replace_file
from infranetes_common.errors import DataLoss

FILE = "installed.json"
_MAX_BYTES = 1 << 20


class Phase(enum.Enum):
    """See `steps`."""

    ABSENT = "absent"
    INSTALLING = "installing"
    INSTALLED = "installed"
    UPGRADING = "upgrading"
    REMOVING = "removing"


@attrs.frozen
class Record:
    """:ivar tree: the tree that the node runs, or is to run. :ivar previous: the one before; "": none.
    :ivar files: each file that was made, as an absolute path on the node, and what it was made for.
    :ivar directories: those that were made for them, the outer ones first.
    :ivar unit: kubelet's unit, once its configuration is to be changed.
    """

    phase: Phase = Phase.ABSENT
    tree: str = ""
    previous: str = ""
    files: Mapping[str, str] = attrs.field(factory=dict)
    directories: tuple[str, ...] = ()
    unit: str = ""


def read(home: Path) -> Record:
    """Return the record in /opt/infranetes, as the node's root shows it.

    :raise DataLoss: it can't be understood."""
    path = home / FILE
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(_MAX_BYTES))
        return Record(
            Phase(data["phase"]),
            str(data["tree"]),
            str(data["previous"]),
            {str(name): str(kind) for name, kind in data["files"].items()},
            tuple(map(str, data["directories"])),
            str(data["unit"]),
        )
    except FileNotFoundError:
        return Record()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataLoss(
            f"{path} can't be understood ({type(error).__name__}: {error}), and says what was installed: "
            "restore it, or remove by hand what docs/install-cluster.md lists"
        ) from None


def write(home: Path, record: Record) -> None:
    """Replace the record; returns when it is on the disk."""
    document = {**attrs.asdict(record), "phase": record.phase.value}
    replace_file(home / FILE, json.dumps(document, indent=1) + "\n")
