# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.guests``: make the guests that tests boot, and that are not there yet.

Names of families (`tiny`, `any`, …) pick some. Without a name, all that are made within seconds; with
`--large`, all.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.guests import catalogue, make_debian, make_infranetes, make_systems, make_tiny

_KEPT = 3  # of each family: trees of several branches share the directory
_MAKERS: Mapping[str, Callable[[str, Path, Path], None]] = {
    "tiny": make_tiny.make,
    "any": make_tiny.make,
    "systems": make_systems.make,
    "infranetes": make_infranetes.make,
    **dict.fromkeys(make_debian.PACKAGES, make_debian.make),
}


def make(family: str) -> None:
    """Make a family's guests, unless they are there."""
    kept = catalogue.directory()
    target = kept / catalogue.key(family)
    if target.exists():
        return
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / f"{family}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f".{family}-", dir=kept) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _MAKERS[family](family, Path(scratch), made)
            assert sorted(each.name for each in made.iterdir()) == sorted(catalogue.FAMILIES[family].files)
            made.chmod(0o755)
            made.rename(target)
        print(f"{target}: made in {time.monotonic() - began:.0f} s", flush=True)
        # A digest has no hyphen: another family's name may begin with this one's.
        others = [each for each in kept.glob(f"{family}-*") if each.name.rpartition("-")[0] == family]
        others.remove(target)
        for old in sorted(others, key=lambda each: each.stat().st_mtime)[: 1 - _KEPT]:
            shutil.rmtree(old)


def main(names: Sequence[str]) -> None:
    """Make the families with these names."""
    large = list(names) == ["--large"]
    some = [each for each, family in catalogue.FAMILIES.items() if large or not family.large]
    for family in some if large or not names else names:
        make(family)


if __name__ == "__main__":
    main(sys.argv[1:])
