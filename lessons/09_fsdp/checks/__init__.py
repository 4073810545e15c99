"""What lesson 09 grades: predictions, ZeRO-1, ZeRO-2 and ZeRO-3 by hand, PyTorch's own, and a norm of shards.

The checks of each exercise are in a file of their own. They run in the order in which they are imported.
"""

# isort: off
from . import predictions  # noqa: F401
from . import optimizer  # noqa: F401
from . import gradients  # noqa: F401
from . import unit  # noqa: F401  the first of the steps to FullySharded
from . import unit_dtypes  # noqa: F401
from . import unit_gradients  # noqa: F401
from . import unit_hooks  # noqa: F401
from . import unit_ahead  # noqa: F401
from . import fully_sharded  # noqa: F401  the first of seven files on FullySharded
from . import hooks  # noqa: F401
from . import by_then  # noqa: F401
from . import residency  # noqa: F401
from . import precision  # noqa: F401
from . import prefetch  # noqa: F401
from . import let_go  # noqa: F401
from . import hybrid_shard  # noqa: F401  the first of three files on it
from . import hybrid_apart  # noqa: F401
from . import hybrid_wire  # noqa: F401
from . import fully_shard_gpt  # noqa: F401
from . import clipped_step  # noqa: F401
