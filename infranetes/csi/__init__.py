# SPDX-License-Identifier: Apache-2.0
"""The driver of Kubernetes' volumes, by the Container Storage Interface: it translates and validates.

What a volume is, the provider knows (`infranetes.providers.volumes`); where kubelet has it published, the
node's mount table (`infranetes.volumes.published`).
"""
