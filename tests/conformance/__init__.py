# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' own end-to-end suite, in the cluster of `tests.cluster`: `make e2e`."""
