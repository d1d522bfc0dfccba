# SPDX-License-Identifier: Apache-2.0
"""`twistd` with other values for some constants, so that a test does not wait for the daemon's own deadlines.

    python -m tests.infranetes.daemon.constants JSON TWISTD-ARGUMENTS...

JSON is an object of values by name, such as {"infranetes.volumes.volumes.FIND_SECONDS": 1}; the name may also
be of a field of a constant, or of a class.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys

import attrs
from twisted.scripts.twistd import run


def change(values: dict[str, float]) -> None:
    """Give constants of modules and fields of them these values. :raise AttributeError: there is none."""
    for name, value in values.items():
        owner, _, changed = name.rpartition(".")
        holder = pkgutil.resolve_name(owner)
        if owner.rpartition(".")[2].isupper():
            module, _, constant = owner.rpartition(".")
            setattr(importlib.import_module(module), constant, attrs.evolve(holder, **{changed: value}))
        else:
            getattr(holder, changed)
            setattr(holder, changed, value)


if __name__ == "__main__":
    change(json.loads(sys.argv[1]))
    sys.argv = ["twistd", *sys.argv[2:]]
    run()
