# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes cluster around the daemon: `make cluster` for people, `tests.cluster.case` for tests."""

from tests.harness.needs import KUBERNETES, VMS

NEEDS = (VMS, KUBERNETES)
