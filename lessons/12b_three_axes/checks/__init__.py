"""What the capstone of Part II grades: who is where on a mesh, who has what of it, and what that sends.

The checks of each exercise are in a file of their own. They run in the order in which they are imported.
"""

# isort: off
from . import places  # noqa: F401
from . import rows  # noqa: F401
from . import assembly  # noqa: F401
from . import assembled  # noqa: F401
from . import one_rank  # noqa: F401
from . import norms  # noqa: F401
from . import axes  # noqa: F401
from . import bug  # noqa: F401
