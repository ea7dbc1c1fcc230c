"""What ``collective tour`` shows: programs, and how they are run."""
