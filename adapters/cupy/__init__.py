"""Adapter for CuPy's arrays."""
