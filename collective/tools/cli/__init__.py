"""The command ``collective``: one module for each subcommand."""
