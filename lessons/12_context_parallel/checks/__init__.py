"""What lesson 12 grades: attention in blocks, a ring of messages, zigzag parts, a model on parts of a text,
attention by whole heads and inside documents, and when a hop is hidden.

The checks of each exercise are in a file of their own. They run in the order in which they are imported.
"""

# isort: off
from . import blocks  # noqa: F401
from . import merges  # noqa: F401
from . import ring  # noqa: F401
from . import zigzag  # noqa: F401
from . import model  # noqa: F401
from . import model_at_work  # noqa: F401
from . import ulysses  # noqa: F401
from . import documents  # noqa: F401
from . import hidden_part  # noqa: F401
from . import bug  # noqa: F401
