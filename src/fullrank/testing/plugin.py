"""pytest plugin, found by its entry point: the marker and the fixture `leak_check`. It imports torch when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fullrank.checking import Report


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `leak_check`."""
    config.addinivalue_line("markers", "leak_check(**options): options of fullrank.check for the fixture leak_check")


@pytest.fixture
def leak_check(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Return `assert_causal` for a test, with every verdict in the JUnit report.

    A test calls leak_check(model, inputs=None, **options). The marker @pytest.mark.leak_check(length=257, quick=False) gives
    options for all calls of a test; those of a call override them.
    """
    from fullrank import testing
    from fullrank.checking import check

    marker = request.node.get_closest_marker("leak_check")

    def check_leaks(model: Any, inputs: Any = None, **options: Any) -> Report:
        __tracebackhide__ = True
        of_marker = marker.kwargs if marker else {}
        report = check(model, inputs, only=testing.CAUSAL, **{"quick": True, **of_marker, **options})
        for finding in report.findings:
            request.node.user_properties.append((f"fullrank.{finding.check}", finding.verdict))
        return testing.require_passes(report)

    return check_leaks
