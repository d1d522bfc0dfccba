# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes around the daemon: `make cluster` for a person, `tests.cluster.case` for tests."""
