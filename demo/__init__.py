"""One pod VM from its image to its end, shown step by step: `make demo`."""
