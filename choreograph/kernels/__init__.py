"""GPU code alone: Triton programs over plain pointers. Knows no plans."""
