# SPDX-License-Identifier: Apache-2.0
"""What the packages say that they are made of: CycloneDX JSON, which debian/sbom writes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

TREE = Path(__file__).resolve().parents[2]
PACKAGES = ("infranetes", "infranetes-common", "infranetes-simulation", "vmserver")
# Those of SPDX's list that the packages' dependencies have.
LICENCES = {
    "BSD-2-Clause-Patent",
    "Apache-2.0",
    "BSD-3-Clause",
    "GPL-2.0",
    "GPL-3.0",
    "LGPL-2.1",
    "MIT",
    "MPL-2.0",
    "ZPL-2.1",
}


def document(package: str) -> Any:  # Any: JSON
    said = subprocess.run([TREE / "debian/sbom", package], check=True, capture_output=True, text=True)
    return json.loads(said.stdout)


class SbomTests(SynchronousTestCase):
    """One document for each package."""

    def test_it_is_cyclonedx_of_this_package_and_version(self) -> None:
        for package in PACKAGES:
            found = document(package)
            self.assertEqual(
                (found["bomFormat"], found["specVersion"], found["version"]), ("CycloneDX", "1.5", 1)
            )
            self.assertRegex(found["metadata"]["timestamp"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
            own = found["metadata"]["component"]
            self.assertEqual((own["name"], own["type"]), (package, "application"))
            version = re.search(r"\((\S+)\)", (TREE / "debian/changelog").read_text())
            assert version is not None
            self.assertEqual(own["version"], version[1])

    def test_every_dependency_has_a_version_a_licence_and_a_reference(self) -> None:
        for package in PACKAGES:
            found = document(package)
            references = [each["bom-ref"] for each in found["components"]]
            self.assertEqual(len(set(references)), len(references))
            self.assertEqual(found["dependencies"], [{"ref": package, "dependsOn": sorted(references)}])
            for each in found["components"]:
                self.assertRegex(each["version"], r"^\d", each)
                self.assertRegex(each["purl"], r"^pkg:deb/\w+/" + re.escape(each["name"]) + "[@?]")
                self.assertIn(each["scope"], ("required", "optional"))
                self.assertTrue(each["licenses"], each)
                for licence in each["licenses"]:
                    words = licence.get("expression") or licence["license"]["id"]
                    self.assertLessEqual(set(words.split(" OR ")), LICENCES, each)

    def test_what_is_declared_is_in_it_with_both_releases_versions(self) -> None:
        by_name = {each["name"]: each for each in document("infranetes")["components"]}
        self.assertEqual(by_name["python3-twisted"]["scope"], "required")
        self.assertEqual(by_name["qemu-system-x86"]["scope"], "optional")
        versions = {each["name"]: each["value"] for each in by_name["qemu-system-x86"]["properties"]}
        self.assertEqual(
            versions,
            {"infranetes:version:debian-12": "7.2", "infranetes:version:debian-13": "10.0"},
        )
        self.assertIn("infranetes-common", by_name)
