# SPDX-License-Identifier: Apache-2.0
"""What CI runs beside `make test`, for which there is no time each day: it takes turns by change and day.

``python -m tests.harness.turns vms`` prints the tests with real VMs that have their turn today: each module
has each third day, and the one that the change of the last day touches most has this day. A change of
everything touches all of them, for which there is no time: the others are named, and have their turn within
two days. ``turns other`` prints the arguments of `make` for one of what takes longest. `CI_DAY`, a number of
days since 1970, makes both the same again.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tests.harness import days

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tests.e2e"
MOST_TOUCHED = 1  # modules that run for a change and not for the day
#: Each slice takes about as long as the others.
VMS: Sequence[Sequence[str]] = (
    (
        "test_pods",
        "test_image_pods",
        "test_user_namespaces",
        "test_clocks",
        "test_sizes",
        "test_networks",
        "test_packages",
        "test_units",
        "test_warm_replicas",
        "test_demo",
    ),
    (
        "test_qemu_provider",
        "test_docker",
        "test_namespaces",
        "test_root_volumes",
        "test_quiet_guest",
        "test_installer",
        "test_held_pods",
        "test_sleeping_vms",
        "test_sleeping_pods",
    ),
    (
        "test_volumes",
        "test_disk_troubles",
        "test_cloud_disks",
        "test_upgrades",
        "test_checkpoints",
        "test_kept_clones",
        "test_node_page",
    ),
)
#: Modules that have no days: their VMs boot what is only made for `make test-nightly`.
AT_NIGHT = frozenset({"test_debian_pods"})
#: Tests with real VMs by the paths whose change has them run at once.
TOUCHED: Mapping[str, Sequence[str]] = {
    "infranetes/providers/qemu/": ("test_qemu_provider",),
    "infranetes/images/machine/": ("test_image_pods",),
    "infranetes/machines/agentless/": ("test_image_pods",),
    "infranetes/machines/": ("test_pods", "test_clocks"),
    "infranetes/pods/": ("test_pods",),
    "infranetes/volumes/": ("test_volumes",),
    "infranetes/providers/qemu/volumes/": ("test_root_volumes",),
    "infranetes/providers/qemu/keep/": ("test_checkpoints",),
    "infranetes/providers/qemu/sleep/": ("test_sleeping_vms",),
    "infranetes/pods/sleeping/": ("test_sleeping_pods",),
    "infranetes/pods/keeping/": ("test_warm_replicas",),
    "vmserver/keeping/": ("test_held_pods", "test_kept_clones"),
    "infranetes/services/": ("test_networks",),
    "infranetes/policies/": ("test_networks",),
    "infranetes/monitoring/": ("test_node_page",),
    "infranetes/guest/": ("test_pods", "test_quiet_guest"),
    "vmserver/containers/oci/": ("test_pods", "test_user_namespaces"),
    "vmserver/containers/docker/": ("test_docker",),
    "infranetes_common/service_proxy/": ("test_networks",),
    "vmserver/firewall/": ("test_networks",),
    "debian/": ("test_packages", "test_units"),
    "infranetes/installer/": ("test_installer",),
    "delivery/": ("test_installer",),
    "demo/": ("test_demo",),
}
_FIRST_IMAGE = (
    "tests.e2e.first_image.FirstImageTests.test_a_pod_runs_in_a_vm_though_nobody_has_built_an_image_on"
)
#: The arguments of `make`, each with the path whose change has it run at once.
OTHERS: Sequence[tuple[str, str]] = (
    ("test-cluster DAY=today", "tests/cluster/test_pods.py"),
    ("test-page", "infranetes/monitoring/page.py"),
    ("conformance", "tests/interop/critest-expected.toml"),
    ("test-otelcol", "infranetes/tracing/"),
    ("test-suite SUITE=trixie", "debian/rules"),
    ("test-promtool", "contrib/"),
    (f"test-first-image TESTS={_FIRST_IMAGE}", "infranetes/guest/"),
    ("test-suite SUITE=trixie DEMO=1", "demo/"),
)


def changed() -> Sequence[str]:
    """Return the paths that the commits of the last day before HEAD's have changed."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, text=True)
        return done.stdout.strip()

    end = git("log", "-1", "--format=%ct")
    before = git("rev-list", "-1", f"--before={int(end) - 86400}", "HEAD") if end else ""
    return git("diff", "--name-only", before, "HEAD").splitlines() if before else []


def touched(paths: Collection[str]) -> list[str]:
    """Return the modules with real VMs that a change of these paths touches, those with most paths first."""
    counted = Counter(
        name
        for path in paths
        for prefix, names in TOUCHED.items()
        if path.startswith(prefix)
        for name in names
    )
    own = {Path(path).stem for path in paths if path.startswith("tests/e2e/test_") and path.endswith(".py")}
    known = {name for names in VMS for name in names}
    return [*(name for name, _ in counted.most_common()), *sorted((own & known) - counted.keys())]


def _any_below(paths: Collection[str], prefix: str) -> bool:
    return any(path.startswith(prefix) for path in paths)


def vms(day: int, paths: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the dotted names of the modules with real VMs that run on a day, with a change of these paths,
    and of those that the change touches, too, but that wait for their days."""
    today = VMS[day % len(VMS)]
    more = [name for name in touched(paths) if name not in today]
    running = [*today, *more[:MOST_TOUCHED]]
    return [f"{PACKAGE}.{name}" for name in running], [f"{PACKAGE}.{name}" for name in more[MOST_TOUCHED:]]


def other(day: int, paths: Collection[str]) -> str:
    """Return the arguments of `make` that run on a day; one whose path has changed comes first."""
    turn = day % len(OTHERS)
    order = [*OTHERS[turn:], *OTHERS[:turn]]
    return next((words for words, path in order if _any_below(paths, path)), order[0][0])


def main(arguments: list[str]) -> None:
    """Print what is asked for."""
    if arguments == ["vms"]:
        running, waiting = vms(days.today(), changed())
        if waiting:
            print("The last day's change touches these, too, whose days come:", *waiting, file=sys.stderr)
        print(*running)
    elif arguments == ["other"]:
        print(other(days.today(), changed()))
    else:
        sys.exit("python -m tests.harness.turns vms|other")


if __name__ == "__main__":
    main(sys.argv[1:])
