"""What runs the tests: the runner, its guards against blocking and leaks, and help for tests."""
