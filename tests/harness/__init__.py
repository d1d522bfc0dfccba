# SPDX-License-Identifier: Apache-2.0
"""The test runner, its guards against blocking and leaks, and helpers for tests."""
