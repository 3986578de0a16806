"""Recipes: `extends` takes another's base and scales."""

from fullrank.config.load import load, resolve


def write(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


PARENT = """
table: parent
paper: Somebody 2020
notes: of the parent
base: {model: {hidden_size: 32, num_attention_heads: 4}, train.seed: 7}
scales:
  paper: {model: {num_hidden_layers: 9}, train: {steps: 100}}
  tiny: {model: {num_hidden_layers: 2}, train: {steps: 5, batch_size: 3}}
rows: {plain: {paper: {valid: 1}}}
"""


def test_base_and_scales_are_laid_on_the_parents(tmp_path):
    write(tmp_path, "parent.yaml", PARENT)
    child = write(
        tmp_path,
        "child.yaml",
        """
extends: parent.yaml
base: {model.num_attention_heads: 8, train: {seed: 9}}
scales:
  tiny: {train: {epochs: 2}}
  small: {model.num_hidden_layers: 4}
rows: {other: {set: {model.norm: post}}}
""",
    )
    recipe = load(child)
    assert (recipe.table, recipe.paper, recipe.notes) == (child, "Somebody 2020", "")
    assert list(recipe.rows) == ["other"]
    assert list(recipe.scales) == ["paper", "small", "tiny"]
    tiny = resolve(child, "other", "tiny").config
    assert (tiny.model.hidden_size, tiny.model.num_attention_heads, tiny.model.num_hidden_layers) == (32, 8, 2)
    assert (tiny.train.seed, tiny.train.steps, tiny.train.epochs, tiny.train.batch_size) == (9, None, 2, 3)
    assert tiny.model.norm == "post"
    paper = resolve(child, "other", "paper").config
    assert (paper.model.num_hidden_layers, paper.train.steps, paper.train.seed) == (9, 100, 9)
    assert resolve(child, "other", "small").config.model.num_hidden_layers == 4


def test_extending_one_that_extends_and_a_shipped_one(tmp_path):
    write(tmp_path, "parent.yaml", PARENT)
    write(tmp_path, "child.yaml", "extends: parent.yaml\nbase: {train.seed: 9}\nrows: {x: }\n")
    grandchild = write(tmp_path, "grandchild.yaml", "extends: child.yaml\nbase: {train.batch_size: 2}\nrows: {y: }\n")
    config = resolve(grandchild, "y", "paper").config
    assert (config.model.num_hidden_layers, config.train.seed, config.train.batch_size) == (9, 9, 2)
    extended = write(tmp_path, "mine.yaml", "extends: mixhead/table1-vanilla\nbase: {train.seed: 3}\nrows: {z: }\n")
    shipped = resolve("mixhead/table1-vanilla", "plain", "tiny").config
    config = resolve(extended, "z", "tiny").config
    assert config.train.seed == 3
    assert (config.model, config.data, config.eval) == (shipped.model, shipped.data, shipped.eval)
