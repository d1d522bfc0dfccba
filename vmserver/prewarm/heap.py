# SPDX-License-Identifier: Apache-2.0
"""The interpreter's memory, made ready for being shared between clones.

A collection of garbage writes into the head of every object that it looks at. In a clone each page that is
written to becomes the clone's own, and nearly all of the agent's objects are modules and functions, which are
there for good. So garbage is collected once, before a template is frozen, and what is left is never looked
at again.
"""

from __future__ import annotations

import ctypes
import gc


def keep_heap_shared() -> None:
    """Collect garbage, and exclude the remaining objects from later collections. Blocks."""
    gc.unfreeze()  # with what was frozen when the agent had loaded its modules
    gc.collect()
    gc.freeze()
    # Return freed memory to the system; only glibc has this function.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
