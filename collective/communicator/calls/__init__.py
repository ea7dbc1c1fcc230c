"""Calls of a communicator as objects, one class for each operation."""
