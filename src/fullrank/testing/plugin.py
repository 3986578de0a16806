"""pytest plugin, found by its entry point: the marker and the fixture `leak_check`. It imports torch when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fullrank.checking import Report


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leak_check(**options): options of fullrank.check for the fixture leak_check")


@pytest.fixture
def leak_check(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """leak_check(model, inputs=None, **options): `assert_causal`, its verdicts in the JUnit report.

    Options of the marker come first: @pytest.mark.leak_check(length=257, quick=False).
    """
    from fullrank import testing

    marker = request.node.get_closest_marker("leak_check")

    def check_leaks(model: Any, inputs: Any = None, **options: Any) -> Report:
        __tracebackhide__ = True
        verdicts: list[str] = []
        try:
            return testing.assert_causal(
                model, inputs, **{**(marker.kwargs if marker else {}), **options, "say": verdicts.append}
            )
        finally:
            for line in verdicts:
                name, _, verdict = line.rpartition(": ")
                request.node.user_properties.append((f"fullrank.{name}", verdict))

    return check_leaks
