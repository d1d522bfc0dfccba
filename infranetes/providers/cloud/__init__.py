# SPDX-License-Identifier: Apache-2.0
"""Pods as instances of a cloud: what all clouds share, with a package for each one."""
