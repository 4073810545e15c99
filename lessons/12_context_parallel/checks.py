"""What lesson 12 grades: attention in blocks, a ring of messages, zigzag parts, a model on parts of a text.

The checks of each exercise are in a file of their own. They run in the order in which they are imported.
"""

# isort: off
from . import check_blocks  # noqa: F401
from . import check_ring  # noqa: F401
from . import check_zigzag  # noqa: F401
from . import check_model  # noqa: F401
from . import check_bug  # noqa: F401
