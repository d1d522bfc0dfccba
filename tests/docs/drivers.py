# SPDX-License-Identifier: Apache-2.0
"""The table of libcloud's drivers in docs/provider-libcloud.md, made from the drivers.

`python -m tests.docs.drivers` prints it, of the release that `wheels.txt` pins, whichever is installed.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys

import attrs

from tests.support.clouds import wheels
from tests.support.clouds.agent_processes import ROOT
from tests.support.clouds.recorded import RELEASE

HEADING = "| Driver | Takes user-data by | Locations | For pods |\n|---|---|---|---|\n"
OWN = {"azure_arm": "azure", "ec2": "aws", "gce": "gcp", "openstack": "openstack", "vsphere": "vsphere"}
GONE = {
    "equinixmetal": "Equinix ended the service in June 2026",
    "exoscale": "Exoscale ended this API in May 2024",
}
_USER_DATA = re.compile(r"(?:ex_)?user_?data|cloud_init")


@attrs.frozen
class Row:
    """What a driver can."""

    driver: str
    makes: bool
    user_data: str
    locations: bool
    sizes: bool
    known: bool  # whether it is one of `dialects`

    def __str__(self) -> str:
        shown = (
            f"`{self.driver}`",
            f"`{self.user_data}`" if self.user_data else "nothing",
            "yes" if self.locations else "no",
            self.verdict,
        )
        return f"| {' | '.join(shown)} |\n"

    @property
    def verdict(self) -> str:
        if self.driver in OWN:
            return f"has [a provider of its own](provider-{OWN[self.driver]}.md)"
        if self.driver in GONE:
            return f"no: {GONE[self.driver]}"
        if not self.makes:
            return "no: it can't make VMs"
        if not self.sizes:
            return "no: it tells no sizes"
        if not self.user_data:
            return "no: no user-data"
        return "yes" if self.known else f'with `user_data = "{self.user_data}"`'


def rows() -> list[Row]:
    """Return what the drivers of the libcloud in use can."""
    from libcloud.compute.base import NodeDriver
    from libcloud.compute.providers import DRIVERS

    from infranetes.providers.cloud.any.dialects import DIALECTS, Dialect, concrete, takes

    found = []
    for name in sorted(each for each in DRIVERS if each != "dummy"):
        driver, its = concrete(name), DIALECTS.get(name, Dialect())
        named = [
            each for each in inspect.signature(driver.create_node).parameters if _USER_DATA.fullmatch(each)
        ]
        sizes = driver.list_sizes is not NodeDriver.list_sizes
        has = driver.list_locations is not NodeDriver.list_locations and takes(driver.create_node, "location")
        makes = driver.create_node is not NodeDriver.create_node
        user_data = its.user_data or (named[0] if named else "")
        found.append(Row(name, makes, user_data, has, sizes, name in DIALECTS))
    return found


def table() -> str:
    """Return the table for the pinned release."""
    wheel = str(wheels.wheel(RELEASE))
    code = f"import sys; sys.path.insert(0, {wheel!r})\nfrom tests.docs.drivers import dump; dump()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=120)
    return HEADING + "".join(str(Row(**each)) for each in json.loads(done.stdout))


def dump() -> None:
    """Print the rows as JSON."""
    print(json.dumps([attrs.asdict(row) for row in rows()]))


if __name__ == "__main__":
    sys.stdout.write(table())
