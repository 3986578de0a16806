"""A trained run as a model of lm-eval (EleutherAI's evaluation harness): `lm_eval --model fullrank --model_args path=DIR`.

This module needs lm-eval: pip install 'fullrank[eval]'.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from torch import Tensor
from tqdm import tqdm

from fullrank.core.errors import InputError
from fullrank.decoding import MemoryReader, sample
from fullrank.experiments.generation import encode_given, encode_prompt
from fullrank.experiments.measure import (
    Flags,
    Passage,
    apply_protocol,
    check_length,
    ending,
    final_protocol,
    passages,
    score,
)
from fullrank.experiments.run_folder import open_causal
from fullrank.kernels import kernel
from fullrank.models import open_model

_log = logging.getLogger(__name__)
_SEEN = 8  # tokens of the prompt that tell how the first new one is joined to it


class FullRankLM(LM):
    """The language model of a run folder, which scores texts as `fullrank eval` does and writes as `fullrank generate` does.

    path, checkpoint, device, kernel, and of `protocol` segment_length, memory_length, same_length, clamp_length, context,
    stride: as the options of `fullrank eval`. streams: a document is read with memory as so many streams side by side; 1, the
    memory is carried from its first token to its last. batch_size: documents, blocks or windows at a time; None or `auto`:
    `eval.batch_size`.
    Raises InputError for runs that translate, name masked tokens or see the future, and as `fullrank eval` does.
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
        self.protocol = final_protocol(config, Flags.from_dict({"batch_size": streams, **protocol}))
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"  # lm-eval says cuda:0 where nobody chose a device
        loaded = open_model(folder, checkpoint=checkpoint, device=device, causal=True)
        loaded.require({"tokenizer"}, "lm-eval")
        self.words, self._device = loaded.tokenizer, loaded.device
        self.model = apply_protocol(loaded.own, self.protocol)
        is_chosen = batch_size is not None and not str(batch_size).startswith("auto")
        self.batch_size = int(str(batch_size)) if is_chosen else config.eval.batch_size
        self.max_gen_toks = max_gen_toks
        self._kernel, self._checkpoint = kernel, checkpoint
        with self._reading():  # an unknown kernel is an error now
            _log.info("%s, checkpoint %s: %s", folder, checkpoint, self.protocol.in_words())

    # -- what lm-eval asks about a model ------------------------------------------------------------------------------

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
        """Tells vocabularies apart in the caches of lm-eval."""
        return f"fullrank-{self.words.kind}-{self.words.fingerprint[:16]}"

    def get_model_info(self) -> dict[str, Any]:
        """Facts that lm-eval writes beside its results."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": "torch.float32",
            "checkpoint": self._checkpoint,
            "protocol": self.protocol.in_words(),
        }

    # -- requests -----------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context) in nats, and whether greedy decoding would write it, of (context, continuation).

        The context is read from the start mark of a text on. A token that holds the end of the context and the beginning of
        the continuation counts to the latter.
        """
        texts = [ending(*self._join(*request.args), self.max_length) for request in requests]
        return self._score(texts, disable_tqdm, greedy=True)

    def _join(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Start mark, context and continuation as tokens, and the first one of the continuation."""
        whole, before = (encode_given(self.words, text) for text in (context + continuation, context))
        shared = 0
        while shared < min(len(whole), len(before)) and whole[shared] == before[shared]:
            shared += 1
        return [self.words.start_id, *whole], 1 + shared

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log p(document) in nats, of each (document,): all of its tokens, read as the protocol says."""
        texts = []
        for request in requests:
            ids = encode_given(self.words, request.args[0])
            check_length(self.model, self.protocol, len(ids))
            texts.append(passages(ids, self.protocol, self.words.start_id))
        return [nats for nats, _ in self._score(texts, disable_tqdm, greedy=False)]

    def _score(self, texts: Sequence[Sequence[Passage]], quiet: bool, *, greedy: bool) -> list[tuple[float, bool]]:
        """Log-probability and greedy flag of texts, each of which is one or several passages."""
        parts = [part for text in texts for part in text]
        with self._reading(), tqdm(total=len(parts), desc="Running loglikelihood requests", disable=quiet) as bar:
            length = self.protocol.segment_length
            options: dict[str, Any] = {"batch_size": self.batch_size, "greedy": greedy, "report": bar.update}
            scores = iter(score(self.model, parts, segment_length=length, **options))
        results = []
        for text in texts:
            of_text = list(itertools.islice(scores, len(text)))
            results.append((-sum(one.nll for one in of_text), all(one.greedy for one in of_text)))
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each (context, settings), up to the first string of `until`.

        Greedy unless `temperature` is above 0 (and `do_sample` not false). Draws depend on lm-eval's `--seed` and on the
        position of the request in the list alone.
        """
        texts, seed = [], torch.initial_seed() % 2**31
        bar = tqdm(requests, desc="Running generate_until requests", disable=disable_tqdm)
        with self._reading():
            for number, request in enumerate(bar):
                prompt, settings = request.args
                texts.append(self._complete(prompt, seed=seed + number, **read_settings(settings, self.max_gen_toks)))
        return texts

    def _complete(self, prompt: str, stop: tuple[str, ...], max_new_tokens: int, **drawing: Any) -> str:
        """The continuation of a prompt, without it, up to the first of the strings `stop`.

        A model with memory reads the prompt in segments. One without reads its last `segment_length` tokens; where positions
        end, as many as leave room for `max_new_tokens`.
        """
        model, most = self.model, None
        if model.max_length is not None:
            most = model.max_length - max_new_tokens
            if most < 1:
                raise InputError(
                    f"max_gen_toks: {max_new_tokens} new tokens and a prompt are more than the {model.max_length} positions "
                    "of this model; lower it"
                )
        length = self.protocol.segment_length
        if not model.memory_length:
            most = length if most is None else min(length, most)
        prompt_ids = encode_prompt(self.words, prompt)[-(most or 0) :]
        seen = prompt_ids[-_SEEN:]
        before = self.words.decode(seen)

        def decode(new: Sequence[int]) -> str:
            """The text of new tokens after those of the prompt: words are joined with a space."""
            text = self.words.decode([*seen, *new])
            return text.removeprefix(before) if text.startswith(before) else self.words.decode(new)

        def is_over(ids: Tensor) -> Tensor:
            return torch.tensor([any(word in decode(new) for word in stop) for new in ids.tolist()], device=ids.device)

        reader = MemoryReader(model, length) if model.memory_length else model
        ids = torch.tensor([prompt_ids], device=self._device)
        drawn = sample(reader, ids, max_new_tokens=max_new_tokens, stop=is_over if stop else None, **drawing)
        text = decode(drawn.ids[0, : drawn.lengths[0]].tolist())
        ends = [text.find(word) for word in stop if word in text]
        return text[: min(ends)] if ends else text

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with kernel(self._kernel), torch.no_grad():
            yield


def read_settings(settings: Mapping[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """The generation settings of a task, as options of `sample`; InputError for one that would be ignored.

    until: a string or several; max_gen_toks, temperature, do_sample, top_k, top_p. `<eos>` ends a line, not a text: it ends
    one where `until` holds a newline.
    """
    known = ("until", "max_gen_toks", "temperature", "do_sample", "top_k", "top_p")
    if wrong := [key for key in settings if key not in known]:
        raise InputError(f"generation settings {', '.join(wrong)}: known are {', '.join(known)}")
    until = settings.get("until") or []
    draws = settings.get("do_sample")
    usual = 1.0 if draws else 0.0
    return {
        "stop": tuple(filter(None, [until] if isinstance(until, str) else until)),
        "max_new_tokens": int(settings.get("max_gen_toks") or max_gen_toks),
        "temperature": 0.0 if draws is False else float(settings.get("temperature", usual) or 0.0),
        "top_k": settings.get("top_k") or None,
        "top_p": settings.get("top_p"),
    }


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
