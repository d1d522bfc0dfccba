# SPDX-License-Identifier: Apache-2.0
"""Modules that are missing, or others, for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def replaced(name: str, module: ModuleType | None) -> Iterator[None]:
    """Have imports of `name` give another module, or fail with None.

    What is imported meanwhile stays. `mock.patch.dict` takes it away, and libraries such as numpy can't be
    imported again.
    """
    was_there, before = name in sys.modules, sys.modules.get(name)
    sys.modules[name] = module  # type: ignore[assignment]  # None: as the import system has it
    try:
        yield
    finally:
        if was_there:
            sys.modules[name] = before  # type: ignore[assignment]
        else:
            sys.modules.pop(name, None)
