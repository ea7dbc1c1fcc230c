"""Folder on the path of a program that imports mpi4py."""
