"""What lesson 07 grades: a tree, rings, exchanges, two levels, what they cost, and a relay of messages.

The checks of each exercise are in a file of their own. They run in the order in which they are imported.
"""

# isort: off
from . import broadcast  # noqa: F401
from . import reduce_scatter  # noqa: F401
from . import all_gather  # noqa: F401
from . import all_reduce  # noqa: F401
from . import all_to_all  # noqa: F401
from . import two_level  # noqa: F401
from . import time  # noqa: F401
from . import relay  # noqa: F401
