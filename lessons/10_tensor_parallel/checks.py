"""What lesson 10 is held to: values against the dense layer in float64, and the way they were reached."""

# In the order of the lesson.
from . import check_functions  # noqa: F401, I001
from . import check_linears  # noqa: F401
from . import check_dropout  # noqa: F401
from . import check_layers  # noqa: F401
from . import check_vocabulary  # noqa: F401
from . import check_model  # noqa: F401
from . import check_bug  # noqa: F401
from . import check_workshop  # noqa: F401
