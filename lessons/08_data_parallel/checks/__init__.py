"""What lesson 08 grades: shares of a batch, equal weights, mean gradients, buckets sent in backward.

The checks of each exercise are in a file of their own. They run in the order in which they are imported.
"""

# isort: off
from . import sharding  # noqa: F401
from . import broadcast  # noqa: F401
from . import gradients  # noqa: F401
from . import share_loss  # noqa: F401
from . import wrapper  # noqa: F401  the first of five files on DataParallel
from . import passes  # noqa: F401
from . import no_sync  # noqa: F401
from . import buckets  # noqa: F401
from . import stays_pending  # noqa: F401
from . import hidden_share  # noqa: F401
from . import guarded_step  # noqa: F401
