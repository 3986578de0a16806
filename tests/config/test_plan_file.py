from __future__ import annotations

from pathlib import Path

import pytest

from fullrank.config.load import read_yaml
from fullrank.config.plan import PlanFile
from fullrank.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainings: [{table: a, sedes: [1]}]", "unknown key 'trainings.sedes'; did you mean 'trainings.seeds'?"),
        ("training: [{table: a}]", "unknown key 'training'; did you mean 'trainings'?"),
        ("set: {}", "trainings: at least one entry"),
        ("trainings: [{rows: [plain]}]", "trainings.table: every entry names a table"),
        ("trainings: [{table: a, seeds: []}]", "trainings.seeds: at least one seed"),
        ("trainings: [{table: a, seeds: [-1]}]", "trainings.seeds"),
        ("trainings: [{table: a, scale: large}]", "trainings.scale: 'paper' or 'small' or 'tiny'"),
    ],
)
def test_faults_are_named_with_their_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        PlanFile.of_file(read_yaml(path), path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
