"""``python -m collective.adapters.chainer SCRIPT`` runs a program of Chainer's or ChainerMN's."""

from .program import become

# In this very module, so that the program is __main__ for pickle and multiprocessing, too.
exec(become(globals()), globals())
