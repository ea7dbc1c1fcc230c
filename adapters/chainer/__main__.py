"""``python -m collective.adapters.chainer SCRIPT``: run a Chainer or ChainerMN program."""

from .program import become

# The program runs in this module, so that pickle and multiprocessing see it as __main__, too.
exec(become(globals()), globals())
