"""What lesson 08 grades: shares of a batch, equal weights, mean gradients, buckets sent in backward.

The checks of each exercise are in a file of their own. They run in the order in which they are imported.
"""

# isort: off
from . import check_sharding  # noqa: F401
from . import check_broadcast  # noqa: F401
from . import check_gradients  # noqa: F401
from . import check_wrapper  # noqa: F401  the first of three files on DataParallel
from . import check_passes  # noqa: F401
from . import check_buckets  # noqa: F401
from . import check_guarded_step  # noqa: F401
