"""The models that bench times and parity trains, once a framework, with their steps."""
