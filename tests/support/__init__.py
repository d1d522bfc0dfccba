"""Real parts for tests, the demo and the benches: a registry, small images."""
