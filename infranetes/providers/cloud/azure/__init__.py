# SPDX-License-Identifier: Apache-2.0
"""Pods on Microsoft Azure."""
