"""The commands of ``collective``: run, bench, parity, doctor, profile."""
