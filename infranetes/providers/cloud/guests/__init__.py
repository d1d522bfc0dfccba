# SPDX-License-Identifier: Apache-2.0
"""VMs of a cloud's images without our agent: their power and consoles by the cloud's API, as IHypervisors."""
