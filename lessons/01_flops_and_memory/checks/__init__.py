"""What lesson 01 grades. The judge measures real models; it does not know the formulas.

The checks of each exercise are in a file of their own. They run in the order in which they are imported.
"""

# isort: off
from . import parameters  # noqa: F401
from . import forward  # noqa: F401
from . import training  # noqa: F401
from . import states  # noqa: F401
from . import activations  # noqa: F401
from . import roofline  # noqa: F401
from . import utilization  # noqa: F401
from . import plan  # noqa: F401
from . import report  # noqa: F401
