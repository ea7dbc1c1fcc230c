"""Ranks on several hosts: an agent on each host starts them, and the supervisor orders it to."""
