"""What lesson 10 is held to: values against the dense layer in float64, and the way they were reached."""

# In the order of the lesson.
from . import functions  # noqa: F401, I001
from . import column  # noqa: F401
from . import row  # noqa: F401
from . import dropout  # noqa: F401
from . import mlp  # noqa: F401
from . import attention  # noqa: F401
from . import grouped  # noqa: F401
from . import embedding  # noqa: F401
from . import entropy  # noqa: F401
from . import model  # noqa: F401
from . import overhead  # noqa: F401
from . import bug  # noqa: F401
from . import workshop  # noqa: F401
