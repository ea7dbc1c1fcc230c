"""``python -m mpi4py.futures PROGRAM``: rank 0 runs the program, the others work for it."""

from ..run import main
from .pool import run_main

if __name__ == "__main__":
    run_main(main)
