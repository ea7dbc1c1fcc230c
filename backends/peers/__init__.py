"""Monitoring of the other ranks: which are lost, which have failed, and which calls they make."""
