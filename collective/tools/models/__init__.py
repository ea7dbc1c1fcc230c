"""The models that bench times and parity trains, in each framework, with their steps."""
