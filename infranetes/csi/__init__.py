# SPDX-License-Identifier: Apache-2.0
"""The Container Storage Interface (CSI) driver for Kubernetes' volumes: it translates and validates calls.

The provider keeps the volumes themselves (`infranetes.providers.volumes`); the node's mount table says where
kubelet has them published (`infranetes.volumes.published`).
"""
