"""``python -m mpi4py PROGRAM``: run a program, and stop the other ranks if it fails."""

from .run import main

if __name__ == "__main__":
    main()
