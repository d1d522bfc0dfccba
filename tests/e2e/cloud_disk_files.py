# SPDX-License-Identifier: Apache-2.0
"""The disks of clouds that tests boot, which are made before because packages are downloaded for them."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

import attrs

from infranetes.guest import image
from infranetes.guest.cloud_disk import build_cloud_disk
from tests.e2e.cleanroot import TREE, NotMade
from tests.e2e.qemu_case import IMAGES

_DISKS = TREE / "build" / "cloud-disks"
_GIB = 3
_UNIT = """\
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=true

[Install]
WantedBy=multi-user.target
"""
# Reads the clock from the boot on, and records each time that it was set, and by how many seconds. A reading
# counts only if nothing came between its parts.
_WATCH = """\
import time

def look():
    while True:
        began = time.monotonic()
        now = time.time()
        ended = time.monotonic()
        if ended - began < 0.1:
            return now, began

before = look()
while True:
    time.sleep(0.1)
    now = look()
    passed, gone_by = (one - other for one, other in zip(now, before))
    if abs(passed - gone_by) > 0.5:
        with open("/run/clock-settings", "a") as file:
            file.write(f"{passed - gone_by:.1f}\\n")
    before = now
"""
_WATCH_UNIT = """\
[Unit]
DefaultDependencies=no

[Service]
ExecStart=python3 -IS /usr/local/lib/watch-clock

[Install]
WantedBy=sysinit.target
"""
_SCRIPT = f"""\
#!/bin/sh -eu
cat >/etc/systemd/system/own.service <<END
{_UNIT}
END
cat >/usr/local/lib/watch-clock <<'END'
{_WATCH}
END
cat >/etc/systemd/system/watch-clock.service <<END
{_WATCH_UNIT}
END
systemctl enable own.service watch-clock.service
# As a kernel's package does:
kernel=$(readlink /vmlinuz)
run-parts --exit-on-error --arg="${{kernel#boot/vmlinuz-}}" --arg="/$kernel" /etc/kernel/postinst.d
"""


@attrs.frozen
class _Recipe:
    kind: str
    script: str = ""


_RECIPES: Mapping[str, _Recipe] = {
    "aws": _Recipe("machine", _SCRIPT),
    "azure": _Recipe("docker"),
    "gcp": _Recipe("machine"),
    "openstack": _Recipe("machine"),
    "vsphere": _Recipe("docker"),
}


def _file(source: str) -> Path:
    """Return where a cloud's disk is kept, made of this guest image by this tree."""
    maker = hashlib.sha256(repr((image.current(IMAGES).key, _RECIPES[source])).encode())
    for module in sorted((TREE / "infranetes" / "guest").glob("*.py")):
        maker.update(module.read_bytes())
    return _DISKS / f"{source}-{maker.hexdigest()[:16]}.raw"


def made(source: str) -> Path:
    """Return a cloud's disk, which was made before."""
    if not (file := _file(source)).exists():
        raise NotMade(file)
    return file


def make_all() -> None:
    """Make the disks that are not there, and remove older ones."""
    _DISKS.mkdir(parents=True, exist_ok=True)
    for source, recipe in _RECIPES.items():
        if (file := _file(source)).exists():
            continue
        for old in _DISKS.glob(f"{source}-*.raw"):
            old.unlink()
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
            script.write(recipe.script)
            script.flush()
            Path(script.name).chmod(0o755)
            own = Path(script.name) if recipe.script else None
            build_cloud_disk(
                source, recipe.kind, file, _GIB, lambda words: None, script=own, image_dir=IMAGES
            )
