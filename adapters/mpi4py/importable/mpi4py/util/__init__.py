"""Helpers of mpi4py: datatypes of NumPy, pickling with separate buffers, synchronisation."""
