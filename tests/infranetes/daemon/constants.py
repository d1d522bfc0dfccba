# SPDX-License-Identifier: Apache-2.0
"""`twistd` with other values for some constants, so that a test does not wait for the daemon's own deadlines.

    python -m tests.infranetes.daemon.constants JSON TWISTD-ARGUMENTS...

JSON is an object of values by name, such as {"infranetes.volumes.volumes.FIND_SECONDS": 1}.
"""

from __future__ import annotations

import importlib
import json
import sys

from twisted.scripts.twistd import run


def change(values: dict[str, float]) -> None:
    """Give constants of modules these values. :raise AttributeError: there is no such constant."""
    for name, value in values.items():
        module_name, _, constant = name.rpartition(".")
        module = importlib.import_module(module_name)
        getattr(module, constant)
        setattr(module, constant, value)


if __name__ == "__main__":
    change(json.loads(sys.argv[1]))
    sys.argv = ["twistd", *sys.argv[2:]]
    run()
