# SPDX-License-Identifier: Apache-2.0
"""Workloads as people have them, in the tests' cluster: by kubectl alone, so that any runtime may be judged.

`make workloads` runs them all; `make test-cluster` those of the day."""
