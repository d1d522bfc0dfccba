# SPDX-License-Identifier: Apache-2.0
"""The chart in a cluster: a node that is kubeadm's, a real API server, and helm."""

from tests.contrib.rendered import HELM
from tests.harness.needs import KUBERNETES, ROOT_USER, VMS, Need, Tier

NEEDS = (ROOT_USER, VMS, KUBERNETES, Need("helm", "make helm", Tier.NIGHTLY, HELM.exists))
