"""Errors, by who can mend them.

`InputError`: the user can (exit status 2); its text says what was given, what is allowed and which key to change.
`RunError`: the machine or the run did (exit status 1): no space left, a diverged loss, a damaged checkpoint.
`Interrupted`: somebody stopped it (exit status 130), and it goes on with the same command.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FullRankError(Exception):
    """Base of the errors that `fullrank` raises on purpose. status: the exit status of a command that ends with it."""

    status = 1


class InputError(FullRankError, ValueError):
    """Input that cannot be used as given."""

    status = 2


class RangeError(InputError, IndexError):
    """A token id outside of the vocabulary."""


class ConfigError(InputError):
    """A configuration that cannot be used; `problems` lists every fault found, one line each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class RunError(FullRankError, RuntimeError):
    """A run that failed although its input was right."""


class Interrupted(RunError):
    """Training was asked to stop (SIGINT, SIGTERM) and has saved its state: the same command resumes it."""

    status = 130


# our keys and values, and their names in nanoGPT, litgpt, fairseq, Hugging Face and the papers
NAMES_ELSEWHERE = {
    "hidden_size": "d_model n_embd n_embed embed_dim emb_dim embedding_dim embedding_size hidden_dim model_dim dim width",
    "num_hidden_layers": "n_layer n_layers num_layers nlayers nlayer layers depth decoder_layers num_decoder_layers",
    "num_attention_heads": "n_head n_heads num_heads nhead nheads heads attention_heads decoder_attention_heads",
    "head_dim": "d_head head_size d_k d_kv",
    "intermediate_size": "d_ff d_inner n_inner ffn_dim ff_dim dim_feedforward ffn_embed_dim mlp_dim ffn_hidden_size",
    "hidden_act": "activation act act_fn activation_fn activation_function nonlinearity",
    "vocab_size": "vocab vocab_size n_vocab num_vocab n_token n_tokens padded_vocab_size num_embeddings",
    "segment_length": "block_size seq_len seq_length sequence_length context_length context_size max_seq_len max_seq_length "
    "bptt tgt_len tokens_per_sample",
    "max_position_embeddings": "block_size n_positions n_ctx max_len max_positions max_seq_len max_seq_length",
    "position": "pos_emb pos_embed pos_encoding positional_encoding positional_embedding position_embedding_type",
    "residual": "dropout dropout_p dropout_rate drop resid_dropout resid_pdrop hidden_dropout hidden_dropout_prob",
    "tied": "tie_weights tie_word_embeddings tie_embeddings weight_tying share_input_output_embed "
    "share_decoder_input_output_embed",
    "mixtures": "n_experts num_softmaxes num_mixtures",
    "steps": "max_steps max_iters max_iter iters iterations num_steps n_steps num_train_steps max_update max_updates "
    "training_steps total_steps train_steps",
    "epochs": "num_epochs n_epochs max_epochs max_epoch num_train_epochs epoch",
    "batch_size": "batch bs bsz micro_batch_size per_device_train_batch_size train_batch_size global_batch_size",
    "gradient_accumulation_steps": "grad_accum grad_acc accumulate accumulation_steps gradient_accumulation update_freq "
    "accumulate_grad_batches grad_accum_steps",
    "learning_rate": "lr max_lr base_lr peak_lr init_lr",
    "warmup_steps": "warmup warmup_iters warmup_updates num_warmup_steps lr_warmup_steps",
    "schedule": "lr_schedule lr_scheduler lr_scheduler_type scheduler sched lr_decay decay_lr",
    "optimizer": "optim optimiser opt",
    "weight_decay": "wd decay l2",
    "max_grad_norm": "grad_clip clip clip_norm clip_grad clip_grad_norm gradient_clip gradient_clip_val",
    "precision": "fp16 bf16 fp32 amp dtype mixed_precision half",
    "every_steps": "eval_interval eval_steps eval_every eval_freq validate_interval val_interval eval_iters",
    "log_every_steps": "log_interval logging_steps log_every log_freq",
    "save_every_steps": "save_interval save_steps save_every checkpoint_every save_interval_updates",
    "name": "dataset corpus dataset_name task",
    "position_wise": "b mixhead_b mix_b positionwise",
    "position_independent": "a mixhead_a mix_a",
    "mixture_of_softmaxes": "mos mixture_of_softmax",
    "rotary": "rope",
    "character": "char chars characters",
    "swiglu": "silu swish glu",
}


def translate_name(name: str, names: Iterable[str]) -> str:
    """Translate a name of another library to ours, if `names` has that; else the name itself."""
    allowed = set(names)
    for ours, elsewhere in NAMES_ELSEWHERE.items():
        if name in elsewhere.split() and ours in allowed:
            return ours
    return name


def suggest(name: str, names: Iterable[str], *, list_all: bool = False) -> str:
    """Suggest names in place of an unknown one, as the end of an error message: those near to it, or all.

    Near are those that begin with the name (`mixhead/table1` for its parts), or else the most similar one.

    Args:
        name: the unknown name.
        names: the names that exist.
        list_all: lists all names after the near ones, too.
    """
    names = list(names)
    name = translate_name(name, names)
    near = [other for other in names if other.startswith(f"{name}-")]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    every = f"known: {', '.join(sorted(names))}"
    if not near:
        return every
    return f"did you mean {' or '.join(map(repr, near))}?" + (f" ({every})" if list_all else "")


def one_line(error: Exception, most: int = 200) -> str:
    """Return the message of an error in one line of `most` characters at most."""
    return " ".join(str(error).split())[:most]


def pip_install(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f"pip install 'fullrank[{extra}]' (in a clone: pip install -e '.[{extra}]')"


def count_things(count: int, thing: str) -> str:
    """Write a number of things: `1 run`, `2 runs`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
