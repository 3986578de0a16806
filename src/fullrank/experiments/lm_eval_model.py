"""A trained run as a model of lm-eval (EleutherAI's evaluation harness): `lm_eval --model fullrank --model_args path=DIR`.

This module needs lm-eval: pip install 'fullrank[eval]'.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from fullrank.core.errors import InputError
from fullrank.experiments.generation import encode_given, encode_prompt, open_writer, write
from fullrank.experiments.measure import (
    Passage,
    apply_protocol,
    change_evaluation,
    check_length,
    final_protocol,
    passages,
    score,
)
from fullrank.experiments.run_folder import open_causal
from fullrank.files import Entries
from fullrank.kernels import kernel
from fullrank.training.device import device_of

_log = logging.getLogger(__name__)
_SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class FullRankLM(TemplateLM):
    """The language model of a run folder, which scores texts as `fullrank eval` does and writes as `fullrank generate` does.

    Args:
        path: run folder.
        checkpoint: checkpoint of the run, as for `fullrank eval`.
        batch_size: documents, blocks or windows at a time; None or `auto` for `eval.batch_size`.
        max_batch_size: an option of lm-eval that is not read.
        device: device, as for `fullrank eval`.
        kernel: kernel of attention, as for `fullrank eval`.
        streams: how many streams side by side a document is read in with memory. With 1, the memory is carried from its
            first token to its last.
        max_gen_toks: most tokens of a continuation, where a task says nothing.
        **protocol: segment_length, memory_length, same_length, clamp_length, context and stride, as for `fullrank
            eval`.

    Raises:
        InputError: the run translates, predicts masked tokens or sees the future, or `fullrank eval` would refuse it.
    """

    def __init__(
        self,
        path: str,
        checkpoint: str = "best",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str = "auto",
        kernel: str = "auto",
        streams: int = 1,
        max_gen_toks: int = 256,
        **protocol: Any,
    ) -> None:
        super().__init__()
        folder = Path(str(path)).expanduser()
        config = open_causal(folder)
        self.protocol = final_protocol(change_evaluation(config, {"batch_size": streams, **protocol}))
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"  # lm-eval says cuda:0 where nobody chose a device
        model, self.words = open_writer(folder, checkpoint, device)
        self.model = apply_protocol(model, self.protocol)
        self._device = device_of(model)
        is_chosen = batch_size is not None and not str(batch_size).startswith("auto")
        self.batch_size = int(str(batch_size)) if is_chosen else config.eval.batch_size
        self.max_gen_toks = max_gen_toks
        self._kernel = kernel
        self._checkpoint = checkpoint
        _log.info("%s, checkpoint %s: %s", folder, checkpoint, self.protocol.in_words())

    @property
    def eot_token_id(self) -> int:
        """The token before the first one of a text: `<eos>`, or the newline where tokens are characters or bytes."""
        return self.words.start_id

    @property
    def max_length(self) -> int | None:
        """The most tokens that are read to predict one; None: any number, through the memory."""
        return self.model.max_length if self.model.memory_length else self.protocol.segment_length

    @property
    def tokenizer_name(self) -> str:
        """Name that tells vocabularies apart in the caches of lm-eval."""
        return f"fullrank-{self.words.kind}-{self.words.fingerprint[:16]}"

    def get_model_info(self) -> Entries:
        """Return facts that lm-eval writes beside its results."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": "torch.float32",
            "checkpoint": self._checkpoint,
            "protocol": self.protocol.in_words(),
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        """Encode a text, after the start mark.

        Args:
            string: a text of a task.
            add_special_tokens: the start mark is left out where this is false.
            **others: options of lm-eval, of which none is read.

        Returns:
            Token ids.
        """
        start = [] if add_special_tokens is False else [self.words.start_id]
        return start + encode_given(self.words, string)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score documents: log p(document) in nats, of each (document,).

        All tokens of a document count. They are read as the protocol says.
        """
        results = []
        for request in tqdm(requests, desc="Running loglikelihood_rolling requests", disable=disable_tqdm):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            check_length(self.model, self.protocol, len(ids))
            scores = self._score(passages(ids, self.protocol, self.words.start_id))
            results.append(sum(log_prob for log_prob, _ in scores))
        return results

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **others: Any,
    ) -> list[tuple[float, bool]]:
        """Score continuations: log p(continuation | context) in nats, and whether greedy decoding would write it.

        Of a longer context, the end that leaves room for the continuation is read. Raises InputError for a continuation
        that is longer than what the model reads at once.
        """
        parts = []
        for _, context, continuation in requests:
            ids = np.asarray([*context, *continuation], dtype=np.int64)
            if self.max_length is not None:
                ids = ids[-self.max_length - 1 :]
            if len(continuation) >= len(ids):
                raise InputError(
                    f"a continuation of {len(continuation):,} tokens, and the model reads at most {self.max_length:,} at once; "
                    "raise segment_length"
                )
            parts.append(Passage(ids, len(ids) - 1 - len(continuation)))
        return self._score(parts)

    def _score(self, parts: Sequence[Passage]) -> list[tuple[float, bool]]:
        with kernel(self._kernel):
            return score(self.model, parts, segment_length=self.protocol.segment_length, batch_size=self.batch_size)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each (context, settings) by `fullrank generate`, up to the first string of `until`.

        Decoding is greedy unless `temperature` is above 0 (and `do_sample` not false). Draws depend on lm-eval's
        `--seed` and on the position of the request in the list alone.
        """
        texts = []
        seed = torch.initial_seed() % 2**31
        for number, request in enumerate(tqdm(requests, desc="Running generate_until requests", disable=disable_tqdm)):
            prompt, settings = request.args
            stops, options = read_settings(settings, self.max_gen_toks)
            written = write(
                self.model,
                prompt,
                tokenizer=self.words,
                seed=seed + number,
                kernel_name=self._kernel,
                **options,
            )
            before = self.words.decode(encode_prompt(self.words, prompt)[1:])
            text = written["texts"][0]["text"].removeprefix(before)
            ends = [text.find(stop) for stop in stops if stop in text]
            texts.append(text[: min(ends, default=None)])
        return texts


def read_settings(settings: Mapping[str, Any], max_gen_toks: int) -> tuple[list[str], dict[str, Any]]:
    """Read the generation settings of a task: the strings that end a text, and options of `write`.

    Settings are `until` (a string or several), `max_gen_toks`, `do_sample`, and options of `sample`. `<eos>` ends a
    line, not a text. It ends a text where `until` holds a newline. Raises InputError for other settings.
    """
    if unknown := [key for key in settings if key not in _SETTINGS]:
        raise InputError(f"generation settings {', '.join(unknown)}: known are {', '.join(_SETTINGS)}")
    options = dict(settings)
    until = options.pop("until", None) or []
    options["max_new_tokens"] = int(options.pop("max_gen_toks", None) or max_gen_toks)
    options["top_k"] = options.get("top_k") or None  # 0: all tokens, as for transformers
    draws = options.pop("do_sample", None)
    if draws is False:
        options["temperature"] = 0.0
    elif draws is None:
        options.setdefault("temperature", 0.0)
    stops = [until] if isinstance(until, str) else until
    return [stop for stop in stops if stop], options


def main() -> None:
    """Run the command `lm_eval` with `--model fullrank` known to it.

    lm-eval after 0.4.13 finds the model by the entry point of this package, versions before do not.
    """
    import lm_eval.models  # noqa: F401 - registers its own models, which it does only while none is registered
    from lm_eval.__main__ import cli_evaluate

    register_model("fullrank")(FullRankLM)
    cli_evaluate()


if __name__ == "__main__":
    main()
