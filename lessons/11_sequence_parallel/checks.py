"""What lesson 11 is held to: values against the dense model in float64, and the way they were reached."""

# In the order of the lesson.
from . import check_functions  # noqa: F401, I001
from . import check_linear  # noqa: F401
from . import check_bytes  # noqa: F401
from . import check_block  # noqa: F401
from . import check_model  # noqa: F401
from . import check_model_dropout  # noqa: F401
from . import check_bug  # noqa: F401
