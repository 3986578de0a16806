"""The errors of `fullrank.core.errors`."""

from fullrank.core.errors import *  # noqa: F403
from fullrank.core.errors import suggest as suggest
