# SPDX-License-Identifier: Apache-2.0
"""The manifests for Virtlet's users. tests.cluster.test_runtime_classes gives them to a real API server."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml
from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config
from infranetes.pods.node.handler_config import DOCKER, MACHINE, handler_faults
from infranetes_common.config import structure
from tests.contrib.queries import CONTRIB

MANIFESTS = CONTRIB / "virtlet" / "virtlet.yaml"
PAGE = CONTRIB.parent / "docs" / "virtlet.md"


class VirtletTests(SynchronousTestCase):
    def setUp(self) -> None:
        found: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFESTS.read_text()))  # Any: YAML
        self.runtime_class, self.policy, self.binding = found

    def test_the_policy_gives_the_runtime_class_that_is_there(self) -> None:
        self.assertEqual(self.runtime_class["kind"], "RuntimeClass")
        (mutation,) = self.policy["spec"]["mutations"]
        expression = mutation["applyConfiguration"]["expression"]
        named = re.findall(r"runtimeClassName: '([^']+)'", expression)
        self.assertEqual(named, [self.runtime_class["metadata"]["name"]])
        self.assertEqual(self.binding["spec"]["policyName"], self.policy["metadata"]["name"])

    def test_it_is_for_new_pods_with_virtlets_annotation_that_name_none(self) -> None:
        (rule,) = self.policy["spec"]["matchConstraints"]["resourceRules"]
        self.assertEqual((rule["resources"], rule["operations"]), (["pods"], ["CREATE"]))
        conditions = {each["name"]: each["expression"] for each in self.policy["spec"]["matchConditions"]}
        self.assertIn("kubernetes.io/target-runtime", conditions["is-meant-for-virtlet"])
        self.assertIn("'virtlet.cloud'", conditions["is-meant-for-virtlet"])
        self.assertIn("runtimeClassName", conditions["names-no-runtime-class"])

    def test_its_handler_is_the_one_that_the_page_shows(self) -> None:
        (block,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
        (name,) = tomllib.loads(block)["handlers"]
        self.assertEqual(name, self.runtime_class["handler"])
        handlers = structure(tomllib.loads(block), Config, source="docs").handlers
        self.assertEqual(handlers[name].images, MACHINE)
        self.assertEqual(list(handler_faults(handlers, DOCKER)), [])
