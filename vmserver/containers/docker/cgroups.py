"""Limits that the Engine API has no word for, written into a running container's own cgroup (v2).

Source: Linux Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from infranetes_common.errors import InvalidArgument

CGROUP2 = Path("/sys/fs/cgroup")

_FILE = re.compile(r"(?:cpu|memory|io|pids|hugetlb|cpuset|misc|rdma)\.[a-zA-Z0-9_.]{1,64}")
_PAGE_SIZE = re.compile(r"[0-9]{1,6}[KMG]B")
_MAX_VALUE = 256


def files(limits: Any) -> dict[str, str]:
    """File and value of each such limit. :raise InvalidArgument: malformed; names it."""
    found = {}
    for page in limits.hugepage_limits:
        if not _PAGE_SIZE.fullmatch(page.page_size):
            raise InvalidArgument(
                f"resources.hugepage_limits: {page.page_size[:40]!r} is no page size (2MB, 1GB)"
            )
        found[f"hugetlb.{page.page_size}.max"] = str(page.limit)
    for name, value in limits.unified.items():
        if not _FILE.fullmatch(name) or ".." in name or len(value) > _MAX_VALUE or not value.isprintable():
            raise InvalidArgument(
                f"resources.unified: {name[:80]!r} is no file of a cgroup, or its value no line"
            )
        found[name] = value
    return found


def check(limits: Any, cgroup2: Path = CGROUP2) -> None:
    """:raise InvalidArgument: a limit that is malformed, or that this machine has no cgroup v2 for."""
    if files(limits) and limits.unified and not (cgroup2 / "cgroup.controllers").exists():
        raise InvalidArgument("resources.unified: the machine has no cgroup v2")


def overlay(limits: Any, later: Any) -> None:
    """Put into `limits` what `later` has of those that the Engine API knows nothing of."""
    limits.unified.update(later.unified)
    sizes = {page.page_size for page in later.hugepage_limits}
    kept = [page for page in limits.hugepage_limits if page.page_size not in sizes]
    pages = [*kept, *later.hugepage_limits]
    limits.ClearField("hugepage_limits")
    limits.hugepage_limits.extend(pages)
    limits.oom_score_adj = later.oom_score_adj or limits.oom_score_adj


def apply(pid: int, limits: Any, cgroup2: Path = CGROUP2) -> None:
    """Put them in force for the container whose first process is `pid`.

    A page size that the machine does not have is left out: there is nothing to limit.

    :raise InvalidArgument: the kernel refuses a value.
    """
    wanted = files(limits)
    if not wanted:
        return
    try:
        group = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return  # ended already
    own = [line[3:] for line in group.splitlines() if line.startswith("0::/")]
    if not own or own[0] == "/":
        return
    directory = cgroup2 / own[0].lstrip("/")
    for name, value in wanted.items():
        file = directory / name
        if name.startswith("hugetlb.") and not file.exists():
            continue
        try:
            file.write_text(value)
        except OSError as error:
            if directory.exists():
                raise InvalidArgument(f"resources.unified: {name} = {value!r}: {error.strerror}") from error
