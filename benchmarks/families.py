"""Every model type that the installed transformers has: can attention be injected, and is the output then the model's own?

    python benchmarks/families.py                  # all types that are on the attention interface, some minutes
    python benchmarks/families.py bert gemma3 t5   # some
    python benchmarks/families.py --json out.json  # to keep

Each type is built tiny from its own configuration, as for `fullrank check hf:TYPE`, with random parameters; no network.
A line for each: `exact` (reference path minus the model's own eager output is 0.0; then the difference of the fast path,
at most 1e-6, and whether a kernel of ours ran), `near` (the reference path within 1e-6 too), `differs` (a fault),
`refused` with the reason, or `not built` (the tiny configuration does not fit). The exit status is 1 if a type differs.
`python -m pytest tests/hf/test_families.py` checks the named families more closely, saved and loaded too.
"""

import argparse
import collections
import copy
import importlib
import inspect
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import fullrank as fr
from fullrank import kernels
from fullrank.core.errors import InputError, one_line
from fullrank.hf.tiny import make_small_config
from machine import write_json

LENGTH = 9  # tokens of a text
VOCABULARY = 64
FIRST_WORD = 4  # ids below are special tokens
LARGEST = 30_000_000  # parameters
SOUNDS = (
    ("input_features", (2, 80, 256)),
    ("input_features", (2, 32, 80)),
    ("input_values", (2, 4000)),
)


def list_types() -> list[str]:
    """List the model types of which some modelling file calls an attention function of the interface."""
    root = Path(transformers.__file__).parent / "models"
    files = {path.parent.name for path in root.glob("*/modeling_*.py") if "ALL_ATTENTION_FUNCTIONS" in path.read_text()}
    find_module = transformers.models.auto.configuration_auto.model_type_to_module_name
    return [kind for kind in CONFIG_MAPPING if find_module(kind) in files]


def examine(kind: str) -> dict[str, Any]:
    """Inject attention into a type of model, and return the verdict and its details."""
    try:
        model, inputs, expected = build(kind)
    except Exception as error:
        return {"verdict": "not built", "details": f"{type(error).__name__}: {one_line(error, 90)}"}
    try:
        injected = fr.inject(model, mix="position_wise", cross_head=0.1)
        with torch.no_grad():
            with fr.kernel("reference"):
                reference = compute_output(injected, inputs)
            with kernels.chosen() as names:
                fast = compute_output(injected, inputs)
    except InputError as error:
        return {"verdict": "refused", "details": one_line(error, 110)}
    except Exception as error:
        return {"verdict": "differs", "details": f"{type(error).__name__}: {one_line(error, 90)}"}
    mask = inputs.get("attention_mask")  # of padding nobody reads the output
    tokens = mask.bool() if mask is not None and mask.shape == expected.shape[:2] else ...
    largest = max(1, expected.abs().max().item())
    off = (reference - expected).abs().max().item()
    fast_off = (fast - expected)[tokens].abs().max().item() / largest
    verdict = "near" if off else "exact"
    if max(off / largest, fast_off) > 1e-6:
        verdict = "differs"
    details = f"reference {off:.1e}  fast {fast_off:.1e} {' '.join(sorted(names)) or 'own weights'}"
    return {"verdict": verdict, "details": details, "query": injected.config.fullrank["query"]}


def build(kind: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    """Build a tiny model of a type; return it, inputs that it takes, and its own eager output."""
    torch.manual_seed(0)
    config = make_small_config(CONFIG_MAPPING[kind])
    with torch.device("meta"):  # costs no memory
        count = make_model(copy.deepcopy(config)).num_parameters()
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters, where {LARGEST:,} are tiny")
    model = make_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
        problems = []
        for inputs in list_inputs(model):
            try:
                expected = compute_output(copy.deepcopy(model), inputs)
            except Exception as error:
                problems.append(error)
                continue
            if not expected.isfinite().all():
                raise ValueError("its own output is not finite")
            return model, inputs, expected
    raise problems[0]


def make_model(config: Any) -> Any:
    """Make the base model of a configuration; of a part that no Auto class knows, the first one in its file."""
    if type(config) in transformers.AutoModel._model_mapping:
        return transformers.AutoModel.from_config(config, attn_implementation="eager")
    package = type(config).__module__.rpartition(".")[0]
    file = importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")
    for item in vars(file).values():
        is_model = isinstance(item, type) and hasattr(item, "_from_config")
        if is_model and item.config_class is type(config) and not item.__name__.endswith("PreTrainedModel"):
            return item._from_config(config, attn_implementation="eager")
    raise ValueError(f"no model of {type(config).__name__}")


def list_inputs(model: Any) -> list[dict[str, Tensor]]:
    """List texts, images or sounds, by what the forward pass takes."""
    takes = inspect.signature(model.forward).parameters
    config = model.config
    ids = torch.randint(FIRST_WORD, VOCABULARY, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    answers = {"decoder_input_ids": ids[:, :5]} if "decoder_input_ids" in takes else {}
    inputs = []
    if "input_ids" in takes:
        inputs += [{"input_ids": ids, "attention_mask": mask, **answers}, {"input_ids": ids}]
    if "pixel_values" in takes:
        size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
        size = size if isinstance(size, int) else 32
        images = {"pixel_values": torch.randn(2, 3, size, size)}
        inputs.append(images)
        if "input_ids" in takes:
            inputs.append({**images, "input_ids": ids})
    for name, shape in SOUNDS:
        if name in takes:
            inputs.append({name: torch.randn(shape), **answers})
    return inputs


def compute_output(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Compute the output by which models are compared: logits, hidden states or embeddings."""
    torch.manual_seed(0)  # some models draw what they mask
    output = model(**inputs)
    names = ("logits", "last_hidden_state", "text_embeds", "pooler_output")
    values = [output[name] for name in names if name in output] or list(output.values())
    return next(value for value in values if torch.is_tensor(value) and value.is_floating_point())


def main() -> None:
    """Examine the types that the command line names, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; none: all that are on the interface")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    results = {}
    for kind in options.types or list_types():
        results[kind] = examine(kind)
        print(f"{kind:32} {results[kind]['verdict']:10} {results[kind]['details']}", flush=True)
    counts = collections.Counter(result["verdict"] for result in results.values())
    print(f"transformers {transformers.__version__}: {dict(counts)}")
    write_json(options.json, {"transformers": transformers.__version__, "types": results})
    sys.exit(counts["differs"] > 0)


if __name__ == "__main__":
    main()
