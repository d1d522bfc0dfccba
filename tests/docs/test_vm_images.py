# SPDX-License-Identifier: Apache-2.0
"""The pod of docs/cloud-init.md that is told something, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from twisted.trial.unittest import SynchronousTestCase

from infranetes.cloud_init.configuration import configuration
from infranetes.cloud_init.document import GuestDocument
from infranetes.machines.agentless.access import GuestFile
from infranetes.providers.annotations import read as read_all
from infranetes.providers.machine_annotations import MountedFile, read

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cloud-init.md"


class ExampleTests(SynchronousTestCase):
    def setUp(self) -> None:
        (self.pod,) = (each for each in self.pods() if "annotations" in each["metadata"])
        self.annotations = self.pod["metadata"]["annotations"]

    def pods(self) -> list[dict[str, Any]]:  # Any: YAML
        found = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
        documents = [each for text in found for each in yaml.safe_load_all(text)]
        return [each for each in documents if each["kind"] == "Pod"]

    def test_its_annotations_are_taken(self) -> None:
        read_all(self.annotations)
        self.assertEqual(len(read(self.annotations).guest.ssh_keys), 1)

    def test_its_source_is_a_file_of_what_it_mounts(self) -> None:
        choices = read(self.annotations).guest
        source = choices.user_data_source
        assert isinstance(source, MountedFile)
        (container,) = self.pod["spec"]["containers"]
        self.assertIn(
            source.path.rpartition("/")[0], [each["mountPath"] for each in container["volumeMounts"]]
        )
        held = {source.path: GuestFile(b"#!/bin/sh\ndate\n")}
        self.assertIsNotNone(configuration(GuestDocument("s1", choices, files=held)))
