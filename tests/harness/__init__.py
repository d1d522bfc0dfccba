# SPDX-License-Identifier: Apache-2.0
"""What runs the tests: the runner, its guards against blocking and leaks, and help for tests."""
