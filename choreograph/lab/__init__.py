"""The papers' experiments: workflows, evaluation, training, profiling."""
