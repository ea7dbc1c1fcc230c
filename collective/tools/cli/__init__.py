"""The command ``collective``: one module a subcommand."""
