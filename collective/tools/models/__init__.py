"""The models that parity trains and benchmarks time, in each framework, with their steps."""
