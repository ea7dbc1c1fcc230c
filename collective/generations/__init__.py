"""Protocol of a communicator's generations, below :mod:`collective.elastic`.

Ranks agree on the ranks that continue after a loss (:mod:`.next_generation`), and processes join
(:mod:`.arrivals`).
"""
