# SPDX-License-Identifier: Apache-2.0
"""Typical workloads in the tests' cluster, controlled by kubectl alone, so that any runtime can be tested.

`make workloads` runs all of them; `make test-cluster` those of the day."""

from tests.harness.needs import KUBERNETES, VMS

NEEDS = (VMS, KUBERNETES)
