"""Every figure that a GPU is held against, predicted and measured, in one table: `python -m benchmarks.gpu`."""
