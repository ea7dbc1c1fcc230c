"""Connections between ranks beside the transport, and the stores where ranks meet.

``link.py`` is an authenticated connection that carries messages. ``server.py`` accepts such
connections, and keeps the values of a store. ``store.py`` is the interface of all stores, and
``secret.py`` derives the keys.
"""
