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
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import fullrank as fr
from fullrank import kernels
from fullrank.core.errors import InputError
from fullrank.hf.tiny import make_small_config

LENGTH, VOCABULARY, FIRST_WORD, LARGEST = 9, 64, 4, 30_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; none: all that are on the interface")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    found = {}
    for kind in given.types or on_the_interface():
        found[kind] = examined(kind)
        print(f"{kind:32} {found[kind]['verdict']:10} {found[kind]['details']}", flush=True)
    counts = collections.Counter(result["verdict"] for result in found.values())
    print(f"transformers {transformers.__version__}: {dict(counts)}")
    if given.json:
        given.json.write_text(json.dumps({"transformers": transformers.__version__, "types": found}, indent=2) + "\n")
    sys.exit(counts["differs"] > 0)


def on_the_interface() -> list[str]:
    """The model types of which some modelling file calls an attention function of the interface."""
    root = Path(transformers.__file__).parent / "models"
    files = {path.parent.name for path in root.glob("*/modeling_*.py") if "ALL_ATTENTION_FUNCTIONS" in path.read_text()}
    return [kind for kind in CONFIG_MAPPING if type_module(kind) in files]


def type_module(kind: str) -> str:
    return transformers.models.auto.configuration_auto.model_type_to_module_name(kind)


def examined(kind: str) -> dict[str, Any]:
    try:
        model, inputs, expected = built(kind)
    except Exception as error:
        return {"verdict": "not built", "details": " ".join(f"{type(error).__name__}: {error}".split())[:110]}
    try:
        injected = fr.inject(model, mix="position_wise", cross_head=0.1)
        with torch.no_grad():
            with fr.kernel("reference"):
                reference = output_of(injected, inputs)
            with kernels.chosen() as names:
                fast = output_of(injected, inputs)
    except InputError as error:
        return {"verdict": "refused", "details": str(error)[:110]}
    except Exception as error:
        return {"verdict": "differs", "details": " ".join(f"{type(error).__name__}: {error}".split())[:110]}
    read = inputs.get("attention_mask")  # of padding nobody reads the output
    tokens = read.bool() if read is not None and read.shape == expected.shape[:2] else ...
    off = (reference - expected).abs().max().item()
    far = (fast - expected)[tokens].abs().max().item()
    largest = max(1, expected.abs().max().item())
    relative = far / largest
    query = injected.config.fullrank["query"]
    details = f"reference {off:.1e}  fast {relative:.1e} {' '.join(sorted(names)) or 'own weights'}"
    verdict = "differs" if max(off / largest, relative) > 1e-6 else "near" if off else "exact"
    return {"verdict": verdict, "details": details, "query": query}


def built(kind: str) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """A tiny model of a type, inputs that it takes, and its own eager output."""
    torch.manual_seed(0)
    config = make_small_config(CONFIG_MAPPING[kind])
    with torch.device("meta"):  # costs no memory
        count = model_of(copy.deepcopy(config), kind).num_parameters()
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters, where {LARGEST:,} are tiny")
    model = model_of(config, kind).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
        problems = []
        for inputs in possible_inputs(model):
            try:
                expected = output_of(copy.deepcopy(model), inputs)
            except Exception as error:
                problems.append(error)
                continue
            if not expected.isfinite().all():
                raise ValueError("its own output is not finite")
            return model, inputs, expected
    raise problems[0]


def model_of(config: Any, kind: str) -> Any:
    """The base model of a configuration; of a part that no Auto class knows, the first one in its file."""
    if type(config) in transformers.AutoModel._model_mapping:
        return transformers.AutoModel.from_config(config, attn_implementation="eager")
    package = type(config).__module__.rpartition(".")[0]
    file = importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")
    classes = [item for item in vars(file).values() if isinstance(item, type) and hasattr(item, "_from_config")]
    own = [
        item for item in classes if item.config_class is type(config) and not item.__name__.endswith("PreTrainedModel")
    ]
    if not own:
        raise ValueError(f"no model of {type(config).__name__}")
    return own[0]._from_config(config, attn_implementation="eager")


def possible_inputs(model: Any) -> list[dict[str, torch.Tensor]]:
    """Texts, images or sounds, by what the forward pass takes."""
    takes, config = inspect.signature(model.forward).parameters, model.config
    ids = torch.randint(FIRST_WORD, VOCABULARY, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
    size = size if isinstance(size, int) else 32
    found: list[dict[str, torch.Tensor]] = []
    if "input_ids" in takes:
        texts = {"input_ids": ids, "attention_mask": mask}
        found += [{**texts, "decoder_input_ids": ids[:, :5]}] if "decoder_input_ids" in takes else [texts]
        found.append({"input_ids": ids})
    if "pixel_values" in takes:
        images = {"pixel_values": torch.randn(2, 3, size, size)}
        found.append(images)
        if "input_ids" in takes:
            found.append({**images, "input_ids": ids})
    for name, shape in (("input_features", (2, 80, 256)), ("input_features", (2, 32, 80)), ("input_values", (2, 4000))):
        if name in takes:
            sounds = {name: torch.randn(shape)}
            found.append({**sounds, "decoder_input_ids": ids[:, :5]} if "decoder_input_ids" in takes else sounds)
    return found


def output_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(0)  # some models draw what they mask
    output = model(**inputs)
    names = ("logits", "last_hidden_state", "text_embeds", "pooler_output")
    values = [output[name] for name in names if name in output] or list(output.values())
    return next(value for value in values if torch.is_tensor(value) and value.is_floating_point())


if __name__ == "__main__":
    main()
