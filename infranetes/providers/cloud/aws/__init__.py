# SPDX-License-Identifier: Apache-2.0
"""Pods on Amazon EC2."""
