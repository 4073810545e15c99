"""What lesson 03 grades: a checkpoint, its use on a GPT's blocks, attention and head, the best group length.

The checks of each exercise are in a file of their own. They run in the order in which they are imported.
"""

# isort: off
from . import checkpoint  # noqa: F401
from . import inputs  # noqa: F401
from . import keeping  # noqa: F401
from . import circumstances  # noqa: F401
from . import blocks  # noqa: F401
from . import segments  # noqa: F401
from . import attention  # noqa: F401
from . import chunks  # noqa: F401
from . import watched  # noqa: F401
