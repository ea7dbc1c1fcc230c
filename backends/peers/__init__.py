"""Watching the other ranks: who is lost, who has failed, who calls what."""
