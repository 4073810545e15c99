"""What lesson 11 is held to: values against the dense model in float64, and the way they were reached."""

# In the order of the lesson.
from . import functions  # noqa: F401, I001
from . import linear  # noqa: F401
from . import bytes  # noqa: F401
from . import block  # noqa: F401
from . import model  # noqa: F401
from . import model_dropout  # noqa: F401
from . import bug  # noqa: F401
