"""CuPy: its arrays as arrays of ``collective``."""
