"""What lesson 04 grades: the gradient of a batch in pieces, the piece that fits, and an epoch's loop.

The checks of each exercise are in a file of their own. They run in the order in which they are imported.
"""

# isort: off
from . import accumulate  # noqa: F401
from . import memory  # noqa: F401  the second file on accumulate_gradients
from . import taken_away  # noqa: F401  a star for accumulate_gradients: of its checks the last
from . import largest  # noqa: F401
from . import epoch  # noqa: F401
